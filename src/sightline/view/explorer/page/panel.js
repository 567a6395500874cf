// The panel beside the map: the active token, its statistics, and the heaviest keys and queries with their weights.

const MORE = 100; // keys that the list of all keys shows first, and then with each press of its button
const LISTED = 24, NARROW_LISTED = 8; // most entries of both lists together, and of each list on a narrow page
const ENTRY = 26, NOTE = 54; // heights in pixels of an entry, and of a note below a list

class Panel {
  constructor(page) {
    this.page = page;
    this.token = make('div', 'sl-card-token');
    this.place = make('div', 'sl-card-place');
    this.facts = make('dl', 'sl-facts');
    this.lists = make('div', 'sl-lists');
    this.shown = 0; // keys in the list of all keys; 0 shows the lists of the token
    const tab = (text, shown) => {
      const node = make('button', 'sl-tab', { type: 'button' }, text);
      node.addEventListener('click', () => this.show(shown));
      return node;
    };
    this.tabs = [tab('This token', 0), tab('All keys', MORE)];
    this.node = make('aside', 'sl-side', { 'aria-label': 'The token' },
      make('div', 'sl-card', {}, this.place, this.token, this.facts),
      make('div', 'sl-tabs', { role: 'group', 'aria-label': 'Lists' }, ...this.tabs), this.lists,
      make('footer', 'sl-foot', {}, ...page.manifest.notes.map((note) => make('p', '', {}, note))));
    const entry = (event) => event.target.closest?.('[data-at]'), place = (text) => (text === undefined ? null : Number(text));
    this.lists.addEventListener('pointerover', (event) => {
      const row = entry(event);
      if (row) page.hoverPair({ i: place(row.dataset.i), j: place(row.dataset.j) });
    });
    this.lists.addEventListener('pointerleave', () => page.hoverPair(null));
    this.lists.addEventListener('click', (event) => {
      const row = entry(event);
      if (row) page.pick({ side: row.dataset.side, at: Number(row.dataset.at) });
    });
    this.show(0);
  }

  /** Show the lists of the active token if `shown` is 0, else a list of that many keys. */
  show(shown) {
    this.shown = shown;
    this.tabs.forEach((tab, k) => tab.setAttribute('aria-pressed', String(Boolean(k) === Boolean(shown))));
    if (this.page.inited) this.draw();
  }

  draw() {
    const active = this.page.active(), { layer, state } = this.page;
    if (!active) return this.empty();
    const asQuery = layer.self || active.side === 'query', asKey = layer.self || active.side === 'key';
    const tokens = asQuery ? layer.queries : layer.keys;
    this.token.textContent = visible(tokens[active.at]);
    this.token.title = tokens[active.at];
    const kind = layer.self ? 'token' : active.side;
    this.place.textContent = `${kind} ${count(active.at)} of 0–${count(tokens.length - 1)}`;
    const facts = [];
    if (asQuery) facts.push(this.entropy(layer.entropy(state.head), active.at));
    if (asKey) facts.push(this.received(layer.received(state.head), active.at));
    this.facts.replaceChildren(...facts.flat());
    const lists = [], most = this.fitting(asQuery && asKey ? 2 : 1);
    if (asQuery) lists.push(this.list('Attends to', 'looks', layer.row(state.head, active.at, most), active.at, layer.keys));
    if (this.shown) lists.splice(0, 2, this.allKeys());
    else if (asKey) lists.push(this.list('Attended to by', 'seen', layer.column(state.head, active.at, most), active.at, layer.queries));
    const { scrollTop } = this.lists;
    this.lists.replaceChildren(...lists);
    if (this.shown) this.lists.scrollTop = scrollTop;
    return undefined;
  }

  /** How many entries each of the lists can have without a scrollbar, at least 4. */
  fitting(lists) {
    if (this.page.narrow()) return NARROW_LISTED;
    const space = this.lists.clientHeight - 24 - (this.limits('seen', 1) ? NOTE : 0) - lists * 24 - (lists - 1) * 18; // padding, headings, the gap between lists
    return Math.max(4, Math.min(Math.floor(space / ENTRY / lists), LISTED / lists));
  }

  empty() {
    this.token.textContent = '';
    this.place.textContent = 'Hover over a token or a cell. Click to select it.';
    this.facts.replaceChildren();
    this.lists.replaceChildren(...(this.shown ? [this.allKeys()] : []));
  }

  entropy(all, at) {
    const spread = Math.exp(all[at]);
    return this.fact('entropy', all[at], 'nats', `as if even over ${spread < 1.005 ? '1 key' : `${digits(spread)} keys`}`);
  }

  received(all, at) {
    let sum = 0;
    for (const value of all) sum += value;
    return this.fact('received', all[at], '', `mean over the keys${this.page.layer.stored.received.levels ? ' ≈' : ':'} ${digits(sum / all.length)}`);
  }

  fact(name, value, unit, note) {
    const { layer, state } = this.page, [written, error] = formatNumber(layer.stored[name], state.head, value);
    const number = make('span', 'sl-number', { 'data-fact': name, title: error ? `${written} ± ${error}` : String(value) }, written);
    return [make('dt', '', {}, name), make('dd', '', {}, number, error ? make('span', 'sl-error', {}, ` ± ${error}`) : '', unit ? ` ${unit}` : '', make('div', 'sl-note', {}, note))];
  }

  list(title, kind, entries, from, tokens) {
    const { layer } = this.page, side = kind === 'looks' && !layer.self ? 'key' : 'query';
    const rows = this.rows(kind, side, layer.pairs, entries, tokens, (at) => (kind === 'looks' ? { i: from, j: at } : { i: at, j: from }));
    const notes = [this.limits(kind, entries.length)].filter(Boolean).map((note) => make('p', 'sl-note', {}, note));
    return make('section', 'sl-list', { 'data-list': kind }, make('h2', `sl-key sl-key-${kind}`, {}, title), ...rows, ...notes);
  }

  /** The keys in descending order of what they receive. */
  allKeys() {
    const { layer, state } = this.page, entries = heaviest(layer.m, (j) => layer.received(state.head)[j], this.shown);
    const rows = this.rows('seen', layer.self ? 'query' : 'key', layer.stored.received, entries, layer.keys, (j) => ({ j }));
    const more = make('button', 'sl-button', { type: 'button' }, `${MORE} more`);
    more.addEventListener('click', () => this.show(this.shown + MORE));
    return make('section', 'sl-list', { 'data-list': 'keys' }, make('h2', 'sl-key sl-key-seen', {}, 'Keys by what they receive'), ...rows,
      ...(entries.length === this.shown && this.shown < layer.m ? [more] : []));
  }

  /** Entries with a bar for each number. All numbers of a list get the same width, so that bars do not reach them and can be compared. */
  rows(kind, side, stored, entries, tokens, pair) {
    const written = entries.map(({ weight }) => formatNumber(stored, this.page.state.head, weight)), most = entries[0]?.weight || 1;
    const width = Math.max(...written.map(([number, error]) => number.length + (error ? error.length + 2 : 0)));
    return entries.map(({ at, weight }, k) => {
      const bar = make('span', 'sl-bar'), [number, error] = written[k], places = Object.entries(pair(at)).map(([name, place]) => [`data-${name}`, place]);
      bar.style.width = `${Math.max((100 * weight) / most, 1)}%`;
      const value = make('span', 'sl-entry-value', {}, make('span', 'sl-number', {}, number), ...(error ? [make('span', 'sl-error', {}, ` ± ${error}`)] : []));
      value.style.width = `${width}ch`;
      return make('button', `sl-entry sl-entry-${kind}`,
        { type: 'button', ...Object.fromEntries(places), 'data-at': at, 'data-side': side, 'data-weight': weight, title: `${tokens[at]}   (${at}): ${error || number.startsWith('≤') ? number : weight}${error && ` ± ${error}`}` },
        make('span', 'sl-entry-main', {}, bar, make('span', 'sl-entry-token', {}, visible(tokens[at])), make('span', 'sl-entry-at', {}, count(at))), value);
    });
  }

  /** What a list leaves out, and what to record for more. */
  limits(kind, found) {
    const { layer } = this.page;
    if (layer.whole || layer.stored[kind === 'seen' ? 'seen_by' : 'looks']) return found ? '' : 'None.';
    if (!layer.pairs) return 'This page stores no weights of pairs. A higher limit= stores them.';
    const most = layer.pairs.shape[2], keys = most === 1 ? 'heaviest key' : `${most} heaviest keys`;
    return `${found ? 'Among' : 'Not among'} the ${keys} of ${found ? 'each' : 'any'} query. Record sightline.weights() to see all queries, top_k(${8 * most}) to see more.`;
  }
}

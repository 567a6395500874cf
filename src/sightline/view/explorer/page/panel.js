// The panel beside the map: the active token, its statistics, and the heaviest keys and queries with their weights.

const LISTED = 24, NARROW_LISTED = 8, ENTRY = 26; // most entries of both lists, of each on a narrow page; an entry's height in pixels

class Panel {
  constructor(page) {
    this.page = page;
    this.token = make('div', 'sl-card-token');
    this.place = make('div', 'sl-card-place');
    this.facts = make('dl', 'sl-facts');
    this.lists = make('div', 'sl-lists');
    this.node = make('aside', 'sl-side', { 'aria-label': 'The token' },
      make('div', 'sl-card', {}, this.place, this.token, this.facts), this.lists,
      make('footer', 'sl-foot', {}, ...page.manifest.notes.map((note) => make('p', '', {}, note))));
    const entry = (event) => event.target.closest?.('[data-i]');
    this.lists.addEventListener('pointerover', (event) => {
      const row = entry(event);
      if (row) page.hoverPair({ i: Number(row.dataset.i), j: Number(row.dataset.j) });
    });
    this.lists.addEventListener('pointerleave', () => page.hoverPair(null));
    this.lists.addEventListener('click', (event) => {
      const row = entry(event);
      if (row) page.pick({ side: row.dataset.side, at: Number(row.dataset.at) });
    });
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
    if (asQuery) lists.push(this.list('Looks at', 'looks', layer.row(state.head, active.at, most), active.at, layer.keys));
    if (asKey) lists.push(this.list('Looked at by', 'seen', layer.column(state.head, active.at, most), active.at, layer.queries));
    this.lists.replaceChildren(...lists);
    return undefined;
  }

  /** How many entries each of the lists can have without a scrollbar, at least 4. */
  fitting(lists) {
    if (this.page.narrow()) return NARROW_LISTED;
    const space = this.lists.clientHeight - 30 - lists * 24 - (lists - 1) * 18; // padding, headings, the gap between lists
    return Math.max(4, Math.min(Math.floor(space / ENTRY / lists), LISTED / lists));
  }

  empty() {
    this.token.textContent = '';
    this.place.textContent = 'Hover over a token or a cell. Click to select it.';
    this.facts.replaceChildren();
    this.lists.replaceChildren();
  }

  entropy(all, at) {
    const spread = Math.exp(all[at]);
    return this.fact('entropy', all[at], 'nats', `as if even over ${spread < 1.005 ? '1 key' : `${digits(spread)} keys`}`);
  }

  received(all, at) {
    let sum = 0;
    for (const value of all) sum += value;
    return this.fact('received', all[at], '', `mean over the keys: ${digits(sum / all.length)}`);
  }

  fact(name, value, unit, note) {
    const { layer, state } = this.page, [written, error] = formatNumber(layer.stored[name], state.head, value);
    const number = make('span', 'sl-number', { 'data-fact': name, title: error ? `${written} ± ${error}` : String(value) }, written);
    return [make('dt', '', {}, name), make('dd', '', {}, number, error ? make('span', 'sl-error', {}, ` ± ${error}`) : '', unit ? ` ${unit}` : '', make('div', 'sl-note', {}, note))];
  }

  list(title, kind, entries, from, tokens) {
    const most = entries[0]?.weight || 1, { layer } = this.page;
    const rows = entries.map(({ at, weight }) => {
      const [i, j] = kind === 'looks' ? [from, at] : [at, from];
      const bar = make('span', 'sl-bar'), [number, error] = layer.formatWeight(this.page.state.head, weight);
      bar.style.width = `${Math.max((100 * weight) / most, 1)}%`;
      return make('button', `sl-entry sl-entry-${kind}`,
        { type: 'button', 'data-i': i, 'data-j': j, 'data-at': at, 'data-side': kind === 'looks' && !layer.self ? 'key' : 'query', 'data-weight': weight, title: `${tokens[at]}   (${at}): ${error || number.startsWith('≤') ? number : weight}${error && ` ± ${error}`}` },
        bar, make('span', 'sl-entry-token', {}, visible(tokens[at])), make('span', 'sl-entry-at', {}, count(at)), make('span', 'sl-number', {}, number),
        ...(error ? [make('span', 'sl-error', {}, `± ${error}`)] : []));
    });
    const notes = [this.limits(kind, entries.length)].filter(Boolean).map((note) => make('p', 'sl-note', {}, note));
    return make('section', 'sl-list', { 'data-list': kind }, make('h2', `sl-key sl-key-${kind}`, {}, title), ...rows, ...notes);
  }

  /** What a list leaves out, and what to record for more. */
  limits(kind, found) {
    const { layer } = this.page;
    if (layer.whole || layer.stored[kind === 'seen' ? 'seen_by' : 'looks']) return found ? '' : 'None.';
    if (!layer.pairs) return 'This page stores no weights of pairs. A higher limit= stores them.';
    const most = layer.pairs.shape[2], keys = most === 1 ? 'heaviest key' : `${most} heaviest keys`;
    return `${found ? 'Among' : 'Not among'} the ${keys} of ${found ? 'each' : 'any'} query. For all queries, record sightline.weights(); for more of them, top_k(${8 * most}).`;
  }
}

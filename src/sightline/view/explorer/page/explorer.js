// The page: its state, its parts, keyboard and controls.

const HELP = [
  ['← → ↑ ↓', 'previous or next head or layer; with the focus on the map or the text, other token'],
  ['Shift + arrows', 'previous or next head or layer, wherever the focus is'],
  ['/', 'search the tokens; Enter goes to the next match, Shift + Enter to the previous one'],
  ['+  −  0', 'zoom in, zoom out, show the whole map; the wheel and pinching zoom, dragging pans'],
  ['Click', 'select a token; hovering over another token then shows the weight between the two'],
  ['Esc', 'clear the selection'],
  ['e  s', 'save the map as PNG, as SVG'],
  ['k', 'list the keys by what they receive, or the keys and queries of the token'],
  ['t', 'switch between light and dark'],
  ['?', 'show this help'],
];

class Explorer {
  constructor(root, manifest, read) {
    Object.assign(this, { root, manifest, read });
    this.state = { text: 0, layer: 0, head: 0, pick: null, hover: null, scale: 'root' };
    this.linked = { looks: new Map(), seen: new Map(), most: { looks: 1, seen: 1 } };
    this.texts = manifest.texts.map((text) => text.layers.map((layer) => new Layer(manifest, layer, read)));
    root.classList.add('sl');
    root.replaceChildren();
    this.themeColours = this.readThemeColours();
    this.measure();
    this.build();
    this.setTheme(null);
    this.choose({ text: 0, ...this.standingOut(this.texts[0]) });
    this.size = this.shownSize();
    new ResizeObserver(() => this.resized()).observe(root);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.setTheme(this.theme));
  }

  get layers() { return this.texts[this.state.text]; }
  get layer() { return this.layers[this.state.layer]; }
  narrow() { return this.root.classList.contains('sl-narrow'); }

  /** Adapt to the size of the root element. In a notebook this is not the size of the window. */
  measure() {
    this.root.classList.toggle('sl-narrow', this.root.clientWidth < 860);
    this.root.classList.toggle('sl-tight', this.root.clientWidth < 1180);
  }

  build() {
    const { manifest } = this;
    this.grid = new Grid(this);
    this.map = new HeadMap(this);
    this.panel = new Panel(this);
    this.strips = { both: new Strip(this, 'both'), query: new Strip(this, 'query'), key: new Strip(this, 'key') };
    this.subtitle = make('span', 'sl-subtitle');
    this.where = make('h2', 'sl-where');
    this.readout = make('div', 'sl-readout', { 'aria-live': 'polite' });
    this.legend = make('div', 'sl-scale');
    this.found = make('span', 'sl-found', { 'aria-live': 'polite' });
    this.search = make('input', 'sl-search', { type: 'search', placeholder: 'Search tokens', 'aria-label': 'Search tokens', spellcheck: 'false' });
    this.search.addEventListener('input', () => this.find(0));
    this.search.addEventListener('keydown', (event) => {
      if (event.key === 'Enter') this.find(event.shiftKey ? -1 : 1);
      if (event.key === 'Escape') this.search.blur();
      if (['Enter', 'Escape'].includes(event.key)) event.preventDefault();
      event.stopPropagation();
    });
    const select = (label, pairs, act) => {
      const node = make('select', '', { 'aria-label': label, title: label }, ...pairs.map(([value, text]) => make('option', '', { value }, text)));
      node.addEventListener('change', () => act(node.value));
      return node;
    };
    const button = (text, title, act, cls = '') => {
      const node = make('button', `sl-button ${cls}`, { type: 'button', title, 'aria-label': title }, text);
      node.addEventListener('click', act);
      return node;
    };
    const texts = select('Text', manifest.texts.map((text, k) => [String(k), `${k + 1}  ${text.name.slice(0, 60)}`]), (k) => this.choose({ text: Number(k) }));
    texts.classList.add('sl-texts');
    const tools = make('div', 'sl-tools', {}, ...(manifest.texts.length > 1 ? [texts] : []),
      make('label', 'sl-searchbox', {}, this.search, this.found),
      select('Colour scale', Object.entries(SCALES).map(([name, [text]]) => [name, text]), (scale) => this.recolour({ scale })),
      button('◐', 'Switch between light and dark (t)', () => this.toggleTheme(), 'sl-icon'),
      button('?', 'Help (?)', () => this.help.showModal(), 'sl-icon'));
    const zooms = make('div', 'sl-zooms', {}, button('−', 'Zoom out (−)', () => this.map.zoom(0.5), 'sl-icon'),
      button('+', 'Zoom in (+)', () => this.map.zoom(2), 'sl-icon'), button('Fit', 'Show the whole map (0)', () => this.map.fit()),
      button('PNG', 'Save the map as PNG (e)', () => this.export('png')), button('SVG', 'Save the map as SVG (s)', () => this.export('svg')));
    this.help = make('dialog', 'sl-help', {}, make('h2', '', {}, 'Keys'),
      make('dl', '', {}, ...HELP.flatMap(([key, text]) => [make('dt', '', {}, key), make('dd', '', {}, text)])),
      make('p', '', {}, 'A row of the map is a query; blue marks the keys it attends to. A column is a key; orange marks the queries that attend to it. Pairs of weight 0 have the background colour.'),
      button('Close', 'Close', () => this.help.close()));
    this.root.append(
      make('header', 'sl-head', {}, make('h1', '', {}, manifest.title), this.subtitle, tools),
      this.grid.node,
      make('section', 'sl-stage', { 'aria-label': 'One head' }, make('div', 'sl-label', {}, this.where, this.readout, zooms), this.map.node, this.legend),
      this.panel.node,
      make('div', 'sl-text', {}, ...Object.values(this.strips).map((strip) => strip.node)),
      this.help);
    this.root.addEventListener('keydown', (event) => this.key(event));
  }

  /** Change the text, the layer or the head. */
  choose(change) {
    const before = this.inited ? this.layer : null, { state } = this;
    const { text = state.text, layer: place = state.layer, head = state.head } = change;
    Object.assign(state, { text, layer: place, head });
    if (change.text !== undefined && !this.layers[state.layer]) state.layer = 0;
    state.head = Math.min(state.head, this.layer.heads - 1);
    const same = before && before.queries === this.layer.queries && before.keys === this.layer.keys;
    if (!same) {
      Object.assign(state, { pick: null, hover: null });
      const { at } = this.standingOut([this.layer], state.head);
      this.last = { side: this.layer.self ? 'query' : 'key', at };
      this.root.classList.toggle('sl-single', this.layers.length === 1 && this.layer.heads === 1);
      const { self, queries, keys } = this.layer;
      this.strips.both.node.hidden = !self;
      this.strips.query.node.hidden = this.strips.key.node.hidden = self;
      if (self) this.strips.both.reset(queries, 'Text');
      else [this.strips.query.reset(queries, 'Queries'), this.strips.key.reset(keys, 'Keys')];
      this.search.value = '';
      this.find(0);
    }
    const { layer, layers } = this, heads = Math.max(...layers.map((l) => l.heads));
    const plural = (number, word) => `${count(number)} ${word}${number === 1 ? '' : 's'}`;
    this.subtitle.textContent = [plural(layers.length, 'layer'), plural(heads, 'head'),
      layer.self ? plural(layer.n, 'token') : `${plural(layer.n, 'query').replace('querys', 'queries')} on ${plural(layer.m, 'key')}`].join(' · ');
    this.where.textContent = `${layer.name} · head ${layer.headName(state.head)}`;
    if (!before || change.text !== undefined) this.grid.reset();
    else {
      this.grid.draw();
      this.grid.reveal();
    }
    this.map.reset(same);
    if (!same) this.strips[layer.self ? 'both' : 'key'].reveal(this.last.at);
    this.inited = true;
    this.link();
    this.changed?.();
  }

  /** {layer, head, at}: the key that gets the largest share of its head's weight. Words inside the text come first, then keys after the first. */
  standingOut(layers, only = null) {
    let best = { layer: 0, head: only ?? 0, at: 0, rank: -1 };
    layers.forEach((layer, l) => {
      const last = layer.m - 1, inner = layer.keys.map((key, j) => (j > 0) + (j > 0 && j < last && /[\p{L}\p{N}]/u.test(key) && !/^[[<].*[\]>]$/u.test(key)));
      for (let head = only ?? 0; head < (only === null ? layer.heads : only + 1); head++) {
        const all = layer.received(head);
        let sum = 0;
        for (const value of all) sum += value;
        all.forEach((value, at) => {
          const rank = inner[at] + Math.min(value / (sum || 1), 0.999);
          if (rank > best.rank) best = { layer: l, head, at, rank };
        });
      }
    });
    return best;
  }

  /** Show what the fragment of the address names, such as #layer=3&head=5&token=12; also text=, query= and key=. Numbers count from 0. */
  follow(hash) {
    const given = Object.fromEntries([...new URLSearchParams(hash.slice(1))].map(([name, value]) => [name, Number(value)]));
    const inside = (value, length) => Number.isInteger(value) && value >= 0 && value < length;
    if (inside(given.text, this.texts.length)) this.choose({ text: given.text });
    if (inside(given.layer, this.layers.length)) this.choose({ layer: given.layer });
    const head = Array.from({ length: this.layer.heads }, (_, k) => Number(this.layer.headName(k))).indexOf(given.head);
    if (head >= 0) this.choose({ head });
    const side = given.key === undefined ? 'query' : 'key', at = given.token ?? given[side];
    if (inside(at, side === 'key' ? this.layer.m : this.layer.n)) this.pick({ side: this.layer.self ? 'query' : side, at });
  }

  /** The fragment of the address for what is shown now, in the form that `follow` reads. */
  hash() {
    const { state, layer, texts } = this, { pick } = state, parts = { layer: state.layer, head: layer.headName(state.head) };
    if (pick) parts[layer.self ? 'token' : pick.side] = pick.at;
    return `#${new URLSearchParams(texts.length > 1 ? { text: state.text, ...parts } : parts)}`;
  }

  /** The active token: the selected token, or else the last token hovered over. */
  active() { return this.state.pick ?? this.last; }

  hover(spot) {
    const { state, layer } = this;
    if (!spot && !state.hover) return;
    state.hover = spot;
    if (spot && !state.pick) {
      const next = spot.i !== null ? { side: 'query', at: spot.i } : { side: 'key', at: spot.j };
      if (!this.last || this.last.at !== next.at || this.last.side !== next.side) {
        this.last = next;
        return this.schedule('link');
      }
    }
    return layer && this.schedule('marks');
  }

  /** Mark a pair on whose entry in a list the pointer is. */
  hoverPair(pair) {
    this.state.hover = pair;
    this.schedule('marks');
  }

  pick(spot, reveal = true) {
    const { state } = this;
    state.pick = spot;
    if (!spot) state.hover = null;
    if (spot && reveal) this.map.reveal(this.layer.self ? 'query' : spot.side, spot.at);
    if (spot) this.strips[this.layer.self ? 'both' : spot.side].reveal(spot.at);
    this.link();
    this.changed?.();
  }

  /** Redraw at the next animation frame: 'link' redraws most, then 'marks', then 'map'. Calls before that frame are combined. */
  schedule(task) {
    if (this.scheduled) return this.scheduled.add(task);
    this.scheduled = new Set([task]);
    return requestAnimationFrame(() => {
      const { scheduled } = this;
      this.scheduled = null;
      if (scheduled.has('link')) this.link();
      else if (scheduled.has('marks')) this.drawMarks();
      else this.map.draw();
    });
  }

  redraw() { if (this.map?.view) this.schedule('map'); }

  /** Find the keys and queries linked with the active token, and redraw everything that shows them. */
  link() {
    const active = this.active(), { layer, state } = this, side = active?.side;
    const looks = active && (layer.self || side === 'query') ? layer.row(state.head, active.at, Infinity) : [];
    const seen = active && (layer.self || side === 'key') ? layer.column(state.head, active.at, Infinity) : [];
    const linked = (entries) => new Map(entries.map(({ at, weight }) => [at, weight]));
    this.linked = { looks: linked(looks), seen: linked(seen), most: { looks: looks[0]?.weight || 1, seen: seen[0]?.weight || 1 } };
    this.panel.draw();
    this.drawMarks();
  }

  drawMarks() {
    this.map.draw();
    this.drawReadout();
    for (const strip of Object.values(this.strips)) if (!strip.node.hidden) strip.shade();
  }

  /** Show the weight of the pair under the pointer. */
  drawReadout() {
    const { layer, state } = this, over = state.hover, pairs = [];
    const pairNode = (i, j) => {
      const { value, below } = layer.weight(state.head, i, j);
      const [shown, error] = value === undefined ? [`≤ ${digits(below)}`, ''] : layer.formatWeight(state.head, value);
      const number = make('b', 'sl-number', { 'data-pair': `${i} ${j}` }, shown);
      return make('span', '', {}, make('span', 'sl-quoted', {}, visible(layer.queries[i])), ` ${count(i)} → `, make('span', 'sl-quoted', {}, visible(layer.keys[j])), ` ${count(j)}  `, number, error && ` ± ${error}`);
    };
    const active = this.active();
    if (over && over.i !== null && over.j !== null && !over.strip) pairs.push(pairNode(over.i, over.j));
    else if (over?.strip && state.pick) {
      const at = over.i ?? over.j;
      if (layer.self || (active.side === 'query' && over.j !== null)) pairs.push(pairNode(active.at, at));
      if ((layer.self && at !== active.at) || (!layer.self && active.side === 'key' && over.i !== null)) pairs.push(pairNode(at, active.at));
    }
    this.readout.replaceChildren(...pairs);
  }

  drawLegend() {
    const { scale } = this.map, { layer } = this;
    if (!scale) return;
    if (this.barColours !== this.colours) {
      this.bar = make('canvas', 'sl-bar-canvas', { width: '160', height: '8', 'aria-hidden': 'true' });
      this.legendText = make('span');
      this.legendMost = make('span', 'sl-number');
      this.legend.replaceChildren(make('span', 'sl-number', {}, '0'), this.bar, this.legendMost, this.legendText);
      this.barColours = this.colours;
      const context = this.bar.getContext('2d');
      for (let x = 0; x < 160; x++) {
        context.fillStyle = cssColour(this.colours[Math.max(paletteIndex(x, 159), 1)]);
        context.fillRect(x, 0, 1, 8);
      }
    }
    const size = (x) => (x === Math.round(x) ? String(x) : x.toFixed(1));
    this.legendMost.textContent = digits(scale.most);
    this.legendText.textContent = (scale.exact ? (layer.pairs.levels ? `weights, roots rounded to 1/${layer.pairs.levels}` : 'weights, each exact') : `${layer.how === 'max' ? 'largest' : 'mean'} of ${size(scale.rows)} × ${size(scale.columns)} pairs`)
      + (scale.over ? `; heaviest pairs drawn ${layer.pairs.levels ? 'one by one' : 'exactly'}, from 0 to 1` : '');
  }

  /** Mark the tokens that contain the searched text, which may be a phrase. A step of 1 or −1 selects the next or previous match. */
  find(step) {
    const needle = this.search.value.toLowerCase(), { layer } = this;
    const query = new Set(needle ? occurrences(layer.queries, needle) : []), key = new Set(needle && !layer.self ? occurrences(layer.keys, needle) : []);
    this.matches = { query, key, both: query };
    const all = [...[...query].map((at) => ({ side: 'query', at })), ...[...key].map((at) => ({ side: 'key', at }))];
    if (needle !== this.needle) [this.needle, this.match] = [needle, -1];
    if (step && all.length) {
      this.match = (this.match + step + all.length + (this.match < 0 && step < 0 ? 1 : 0)) % all.length;
      this.pick({ ...all[this.match] });
    } else if (this.inited) {
      if (all.length) this.strips[layer.self ? 'both' : all[0].side].reveal(all[0].at);
      for (const strip of Object.values(this.strips)) if (!strip.node.hidden) strip.shade();
    }
    this.found.textContent = needle ? (all.length ? `${this.match < 0 ? '' : `${count(this.match + 1)} of `}${count(all.length)}` : 'none') : '';
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest?.('select, dialog')) return;
    const { state, layers } = this, on = event.target, tokens = !event.shiftKey && (on === this.map.canvas || on.closest?.('.sl-strip'));
    const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const actions = {
      '/': () => { this.search.focus(); this.search.select(); },
      '+': () => this.map.zoom(2), '=': () => this.map.zoom(2), '-': () => this.map.zoom(0.5), 0: () => this.map.fit(),
      Escape: () => { this.last = null; this.pick(null); },
      e: () => this.export('png'), s: () => this.export('svg'), k: () => this.panel.show(this.panel.shown ? 0 : MORE), t: () => this.toggleTheme(), '?': () => this.help.showModal(),
    };
    if (arrows && tokens) this.step(...arrows);
    else if (arrows) {
      const layer = Math.max(0, Math.min(layers.length - 1, state.layer + arrows[1]));
      const head = Math.max(0, Math.min(layers[layer].heads - 1, state.head + arrows[0]));
      this.choose({ layer, head });
    } else if (actions[event.key]) actions[event.key]();
    else return;
    event.preventDefault();
  }

  /** Select the token beside the active one (x), or the token in the line above or below it (y). */
  step(x, y) {
    const active = this.active() ?? { side: 'query', at: 0 }, { layer } = this;
    const strip = this.strips[layer.self ? 'both' : active.side], length = active.side === 'key' ? layer.m : layer.n;
    let at = active.at + x;
    if (y) {
      const line = strip.lines[strip.lineOf[active.at]], next = strip.lines[strip.lineOf[active.at] + y];
      if (!next) return;
      const from = line.find((token) => token.at === active.at);
      at = next.reduce((best, token) => (Math.abs(token.x - from.x) < Math.abs(best.x - from.x) ? token : best)).at;
    }
    if (at >= 0 && at < length) this.pick({ side: active.side, at });
  }

  toggleTheme() { this.setTheme(this.dark ? 'light' : 'dark'); }

  setTheme(theme) {
    this.theme = theme;
    this.dark = theme ? theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
    this.root.dataset.theme = this.dark ? 'dark' : 'light';
    this.themeColours = this.readThemeColours();
    this.recolour({});
  }

  readThemeColours() {
    const style = getComputedStyle(this.root), themeColours = { font: style.fontFamily };
    for (const name of ['ink', 'muted', 'line', 'ground', 'cross', 'blue', 'orange']) themeColours[name] = style.getPropertyValue(`--${name}`).trim();
    return themeColours;
  }

  recolour(change) {
    Object.assign(this.state, change);
    this.colours = palette(this.manifest.colours[this.dark ? 'dark' : 'light'], this.state.scale);
    if (!this.inited) return;
    this.grid.reset();
    this.map.reset(true);
    this.link();
  }

  /** The size that the layout depends on, as text. A narrow page has no height in it, because its height follows from its width. */
  shownSize() {
    const { clientWidth, clientHeight } = this.root;
    return this.narrow() ? `${clientWidth}` : `${clientWidth} ${clientHeight}`;
  }

  resized() {
    this.measure();
    if (this.size === this.shownSize()) return;
    this.size = this.shownSize();
    for (const strip of Object.values(this.strips)) if (!strip.node.hidden) strip.layout();
    this.grid.reset();
    this.map.reset(false);
    this.link();
  }

  /** Draw the visible map with its title and its scale on a context with `ratio` pixels per CSS pixel. Returns the drawing's size in CSS pixels. */
  compose(context, ratio) {
    const { map, themeColours, layer, state, manifest } = this, head = 44, size = [map.width, map.height + head + 28];
    context.fillStyle = themeColours.ground;
    context.fillRect(0, 0, ...size);
    Object.assign(context, { fillStyle: themeColours.ink, font: `600 14px ${themeColours.font}` });
    context.fillText(`${manifest.title}: ${layer.name}, head ${layer.headName(state.head)}`, 16, 28);
    context.save();
    context.translate(0, head);
    map.paint(context, ratio);
    context.restore();
    this.drawLegend(); // the painted level may be finer than the level on the screen
    const y = map.height + head + 4;
    context.drawImage(this.bar, 30, y, 160, 8);
    Object.assign(context, { fillStyle: themeColours.muted, font: `11px ${themeColours.font}`, textAlign: 'left', textBaseline: 'top' });
    context.fillText('0', 16, y - 2);
    context.fillText(`${this.legendMost.textContent}   ${this.legendText.textContent}`, 198, y - 2);
    return size;
  }

  /** The map as a canvas with three pixels per CSS pixel. */
  picture() {
    const canvas = make('canvas'), context = canvas.getContext('2d'), ratio = 3;
    Object.assign(canvas, { width: this.map.width * ratio, height: (this.map.height + 72) * ratio });
    context.scale(ratio, ratio);
    this.compose(context, ratio);
    this.map.draw();
    return canvas;
  }

  /** The map as SVG text. */
  vector() {
    const context = new VectorContext(), size = this.compose(context, 3);
    this.map.draw();
    return context.text(...size);
  }

  export(kind) {
    const save = (blob) => {
      const title = `${this.manifest.title} ${this.layer.name} head ${this.layer.headName(this.state.head)}`;
      const name = `${title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, '-')}.${kind}`;
      const link = make('a', '', { href: URL.createObjectURL(blob), download: name });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    };
    if (kind === 'svg') save(new Blob([this.vector()], { type: 'image/svg+xml' }));
    else this.picture().toBlob(save);
  }
}

/** Positions of the tokens that an occurrence of `needle` covers, in the text that the tokens form. */
function* occurrences(tokens, needle) {
  const pieces = isWordPiece(tokens), ends = [];
  let text = '';
  tokens.forEach((token, at) => {
    const shown = visible(token).toLowerCase();
    text += (at && hasSpaceBefore(token, pieces) ? ' ' : '') + (pieces && shown.startsWith('##') ? shown.slice(2) : shown);
    ends.push(text.length);
  });
  let token = 0;
  for (let from = text.indexOf(needle); from >= 0; from = text.indexOf(needle, from + needle.length)) {
    while (ends[token] <= from) token++;
    for (let at = token; at < tokens.length && (at === token || ends[at - 1] < from + needle.length); at++) yield at;
  }
}

/** Draw the explorer into an element of a page or of a notebook cell. */
function explorer(root, manifest, read) { return new Explorer(root, manifest, read); }

/** Start the page of a file: the data are in script elements, and the explorer handles every key of the document. */
function explorerPage() {
  const manifest = JSON.parse(document.getElementById('sl-manifest').textContent);
  const shown = explorer(document.getElementById('sightline'), manifest, (at) => document.getElementById(`sl-array-${at}`).textContent);
  document.addEventListener('keydown', (event) => { if (!shown.root.contains(event.target)) shown.key(event); });
  shown.follow(location.hash);
  window.addEventListener('hashchange', () => shown.follow(location.hash));
  shown.changed = () => history.replaceState(null, '', shown.hash());
  window.sightline = shown;
}

// The grid of small maps: rows of heads for each layer.

const MIN_MAP_SIDE = 20, MIN_TOUCH_SIDE = 44; // smallest side of a small map in pixels, for a mouse and for fingers
const MAX_GRID_SHARE = 0.34; // of the width of the page
const HEADER = 17, NUMBER = 13; // height in pixels of the row of heads' numbers, and of a number above its map
const FIRST_PAINT = 1000; // most milliseconds for painting maps before the page appears

class Grid {
  constructor(page) {
    this.page = page;
    this.canvas = make('canvas', 'sl-grid-canvas', { role: 'img', tabindex: '0' });
    this.tip = make('div', 'sl-grid-tip', { 'aria-live': 'polite' });
    this.heads = make('div', 'sl-grid-heads', { 'aria-hidden': 'true' });
    this.scroller = make('div', 'sl-grid-scroll', {}, this.heads, this.canvas);
    this.node = make('section', 'sl-grid', { 'aria-label': 'Layers and heads' },
      make('div', 'sl-label', {}, make('h2', '', {}, 'Heads'), this.tip), this.scroller);
    this.canvas.addEventListener('pointermove', (event) => this.hover(event));
    this.canvas.addEventListener('pointerleave', () => this.hover(null));
    this.canvas.addEventListener('click', (event) => {
      const at = this.at(event);
      if (at) page.choose(at);
    });
    this.hovered = null;
  }

  /** Choose the size of the small maps, and the number of columns. The heads of a layer may wrap into rows of equal length. */
  layout() {
    const { layers, root } = this.page, heads = Math.max(...layers.map((layer) => layer.heads)), narrow = this.page.narrow();
    this.left = layers.length > 1 ? 26 : 0;
    const width = (narrow ? this.scroller.clientWidth : root.clientWidth * MAX_GRID_SHARE) - this.left - 4;
    const height = this.scroller.clientHeight - 4 - layers.length * 4;
    const names = layers.map((layer) => Array.from({ length: layer.heads }, (_, head) => layer.headName(head)).join()), alike = names.every((name) => name === names[0]);
    const rowsOf = (columns) => layers.reduce((sum, layer) => sum + Math.ceil(layer.heads / columns), 0);
    const options = [];
    for (let rows = heads; rows >= 1; rows--) {
      const columns = Math.ceil(heads / rows), step = Math.floor(Math.min(width / columns, narrow ? 64 : 104));
      const above = alike && rows === 1 ? 0 : NUMBER; // one row of numbers serves all layers if no layer wraps
      options.push({ columns, step, above, fitting: Math.floor(Math.min(step, (height - (above ? 0 : HEADER)) / rowsOf(columns) - above)) });
    }
    let best = null;
    if (narrow) best = options.filter(({ step }) => step >= MIN_TOUCH_SIDE).at(-1) ?? options[0]; // the reader scrolls through the rows
    else {
      best = options.reduce((most, option) => (option.fitting > most.fitting ? option : most));
      if (best.fitting >= MIN_MAP_SIDE) best.step = best.fitting;
      else best = options.filter(({ step }) => step >= MIN_MAP_SIDE).at(-1) ?? options[0];
    }
    const step = Math.max(best.step, MIN_MAP_SIDE); // a page of one head hides the grid, which then has no width
    Object.assign(this, { columns: best.columns, above: best.above, step, gap: step > 40 ? 4 : 2 });
    this.places = [];
    let y = 0;
    layers.forEach((layer, l) => {
      for (let head = 0; head < layer.heads; head++) {
        const column = head % this.columns, row = Math.floor(head / this.columns);
        this.places.push({ layer: l, head, x: this.left + column * this.step, y: y + row * (this.step + this.above) + this.above });
      }
      y += Math.ceil(layer.heads / this.columns) * (this.step + this.above) + 4;
    });
    this.size = [this.left + this.columns * this.step, y];
    this.header = this.above ? 0 : HEADER;
    this.heads.hidden = !this.header;
    this.heads.replaceChildren(...(this.header ? this.places.slice(0, heads) : []).map(({ head, x }) => {
      const node = make('span', '', {}, String(layers[0].headName(head)));
      Object.assign(node.style, { left: `${x}px`, width: `${step}px` });
      return node;
    }));
    root.style.setProperty('--grid-width', `${this.size[0] + (y + this.header > this.scroller.clientHeight ? 12 : 0)}px`);
  }

  /** Redraw everything, for other data, another theme or another size. */
  reset() {
    this.layout();
    const ratio = window.devicePixelRatio || 1, [width, height] = this.size;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    this.images = new Map();
    const names = this.page.layers.map((layer) => layer.name).join(', ');
    this.canvas.setAttribute('aria-label', `Small maps of every head: ${names}. The left and right keys choose a head, the up and down keys a layer.`);
    this.paint((this.paintPass = {}), 0, FIRST_PAINT);
    this.reveal();
  }

  /** Paint the maps from place k on, for a time in milliseconds. Timers paint the others later, in turns of 8 ms. */
  paint(paintPass, k, time) {
    if (paintPass !== this.paintPass) return;
    const until = performance.now() + time;
    let next = k;
    while (next < this.places.length && performance.now() < until) this.image(this.places[next++]);
    this.draw();
    if (next < this.places.length) setTimeout(() => this.paint(paintPass, next, 8));
  }

  /** Scroll to the chosen head. */
  reveal() {
    const { layer, head } = this.page.state, place = this.places.find((p) => p.layer === layer && p.head === head);
    const { scrollTop, clientHeight } = this.scroller;
    if (place.y - this.above < scrollTop || place.y + this.header + this.step > scrollTop + clientHeight) this.scroller.scrollTop = place.y - (clientHeight - this.step) / 2;
  }

  image({ layer, head }) {
    const name = `${layer}.${head}`;
    if (!this.images.has(name)) {
      const level = this.page.layers[layer].small(head, (this.step - this.gap) * (window.devicePixelRatio || 1));
      this.images.set(name, paintLevel(level, this.page.colours));
    }
    return this.images.get(name);
  }

  draw() {
    const context = this.canvas.getContext('2d'), ratio = window.devicePixelRatio || 1, side = this.step - this.gap;
    const { layer, head } = this.page.state, theme = this.page.themeColours;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, ...this.size);
    context.font = `11px ${theme.font}`;
    context.textBaseline = 'middle';
    [...this.heads.children].forEach((node, k) => node.classList.toggle('is-chosen', k === head));
    let last = -1;
    for (const place of this.places) {
      const image = this.images.get(`${place.layer}.${place.head}`), x = place.x + this.gap / 2, y = place.y + this.gap / 2;
      if (place.layer !== last && this.left) {
        last = place.layer;
        context.fillStyle = place.layer === layer ? theme.ink : theme.muted;
        context.textAlign = 'right';
        context.fillText(this.page.layers[place.layer].short, this.left - 7, y + side / 2);
      }
      context.fillStyle = theme.line;
      if (!image) context.fillRect(x, y, side, side);
      else {
        context.imageSmoothingEnabled = image.width > side / 2 && image.width !== side; // else a few rows would be doubled
        context.drawImage(image, x, y, side, side);
      }
      const chosen = place.layer === layer && place.head === head;
      if (this.above) {
        context.fillStyle = chosen ? theme.ink : theme.muted;
        context.textAlign = 'center';
        context.fillText(this.page.layers[place.layer].headName(place.head), place.x + this.step / 2, y - 7);
      }
      if (chosen || (this.hovered && place === this.hovered)) {
        context.strokeStyle = chosen ? theme.ink : theme.muted;
        context.lineWidth = chosen ? 2 : 1;
        context.strokeRect(x - 1, y - 1, side + 2, side + 2);
      }
    }
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    return this.places.find((p) => x >= p.x && x < p.x + this.step && y >= p.y && y < p.y + this.step) ?? null;
  }

  hover(event) {
    this.hovered = event ? this.at(event) : null;
    this.canvas.style.cursor = this.hovered ? 'pointer' : 'default';
    this.tip.textContent = this.hovered ? `${this.page.layers[this.hovered.layer].name} · head ${this.page.layers[this.hovered.layer].headName(this.hovered.head)}` : '';
    this.draw();
  }
}

// The grid of small maps: rows of heads for each layer.

class Grid {
  constructor(page) {
    this.page = page;
    this.canvas = make('canvas', 'sl-grid-canvas', { role: 'img', tabindex: '0' });
    this.tip = make('div', 'sl-grid-tip', { 'aria-live': 'polite' });
    this.scroller = make('div', 'sl-grid-scroll', {}, this.canvas);
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

  /** Choose the largest cells with which all heads of all layers fit; the heads of a layer may wrap into several rows. */
  layout() {
    const layers = this.page.layers, heads = Math.max(...layers.map((layer) => layer.heads));
    const width = this.scroller.clientWidth, height = Math.max(this.scroller.clientHeight, 200);
    this.left = layers.length > 1 ? 26 : 0;
    const rowsOf = (columns) => layers.reduce((sum, layer) => sum + Math.ceil(layer.heads / columns), 0);
    let best = null;
    for (let most = heads; most >= 1; most--) {
      const columns = Math.ceil(heads / Math.ceil(heads / most)); // rows of equal length
      const step = Math.min((width - this.left) / columns, 104);
      const fits = rowsOf(columns) * step + layers.length * 4 <= height;
      if (!best || (fits && step > best.step)) best = { columns, step };
    }
    best.step = Math.max(Math.floor(best.step), 14);
    Object.assign(this, best, { gap: best.step > 40 ? 4 : 2 });
    this.places = [];
    let y = 0;
    layers.forEach((layer, l) => {
      for (let head = 0; head < layer.heads; head++) {
        const column = head % this.columns, row = Math.floor(head / this.columns);
        this.places.push({ layer: l, head, x: this.left + column * this.step, y: y + row * this.step });
      }
      y += Math.ceil(layer.heads / this.columns) * this.step + 4;
    });
    this.size = [this.left + this.columns * this.step, y];
  }

  /** Redraw everything, for other data, another theme or another size. Maps are painted for 8 ms at a time. */
  reset() {
    this.layout();
    const ratio = window.devicePixelRatio || 1, [width, height] = this.size;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    this.images = new Map();
    const names = this.page.layers.map((layer) => layer.name).join(', ');
    this.canvas.setAttribute('aria-label', `Small maps of every head: ${names}. The left and right keys choose a head, the up and down keys a layer.`);
    this.draw();
    const paintPass = (this.paintPass = {});
    const paint = (from) => {
      if (paintPass !== this.paintPass || !this.node.isConnected) return;
      const until = performance.now() + 8;
      let k = from;
      while (k < this.places.length && performance.now() < until) this.image(this.places[k++]);
      this.draw();
      if (k < this.places.length) setTimeout(paint, 0, k);
    };
    setTimeout(paint, 0, 0);
  }

  image({ layer, head }) {
    const name = `${layer}.${head}`;
    if (!this.images.has(name)) {
      const level = this.page.layers[layer].coarse(head, (this.step - this.gap) * (window.devicePixelRatio || 1));
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
        context.imageSmoothingEnabled = image.width > side;
        context.drawImage(image, x, y, side, side);
      }
      const chosen = place.layer === layer && place.head === head;
      if (chosen || (this.hovered && place === this.hovered)) {
        context.strokeStyle = chosen ? theme.accent : theme.muted;
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

// The large map of one head: tokens at the left and above, each query's entropy at the right, the weight each key receives below.

const MAX_CELL = 64, FIT = 56; // in pixels: largest cell size, and largest cell size if the whole map is visible
const EXACT_CELLS = 12000; // up to this number, cells are drawn one by one on whole pixels; more cells are drawn as one scaled image
const EXACT_ROWS = 1200; // up to this number of visible queries, stored exact entries are drawn over pooled cells

class HeadMap {
  constructor(page) {
    this.page = page;
    this.canvas = make('canvas', 'sl-map-canvas', { tabindex: '0', role: 'img' });
    this.node = make('div', 'sl-map', {}, this.canvas);
    this.pointers = new Map();
    const listen = (name, act, options) => this.canvas.addEventListener(name, (event) => act.call(this, event), options);
    listen('pointerdown', this.down);
    listen('pointermove', this.move);
    listen('pointerup', this.up);
    listen('pointercancel', this.up);
    listen('pointerleave', () => page.hover(null));
    listen('dblclick', (event) => this.zoom(2, event));
    listen('wheel', this.wheel, { passive: false });
  }

  /** Compute the size and the margins for this layer's tokens, and show the whole map or the present view. */
  reset(keepView = false) {
    const { layer, themeColours } = this.page, ratio = window.devicePixelRatio || 1, narrow = this.page.narrow();
    const context = this.canvas.getContext('2d');
    this.node.style.height = '';
    this.width = this.node.clientWidth;
    this.height = narrow ? 1.4 * this.width : this.node.clientHeight;
    this.bars = narrow ? 38 : 46;
    context.font = `11px ${themeColours.font}`;
    const widest = (tokens) => tokens.slice(0, 400).reduce((w, t) => Math.max(w, context.measureText(visible(t)).width), 10);
    this.widest = widest(layer.keys);
    this.full = { left: Math.max(Math.min(widest(layer.queries), this.width * 0.2, 92) + 14, CORNER), top: Math.min(this.widest, 64) + 14 };
    this.minScale = null;
    this.painted = new Map();
    if (narrow) { // no higher than the whole map needs
      const scale = this.fitScale(), { top } = this.frame({ ...scale, spare: 0 });
      this.height = Math.ceil(top + layer.n * scale.sy + this.bars + 16);
      this.node.style.height = `${this.height}px`;
    }
    Object.assign(this.canvas, { width: this.width * ratio, height: this.height * ratio });
    if (!keepView || !this.view) this.fit(false);
    else this.setView(this.clamp(this.view));
    this.canvas.setAttribute('aria-label', `Weights of ${layer.n} queries on ${layer.m} keys, ${layer.name}, head ${layer.headName(this.page.state.head)}.`);
  }

  /** The position of the map for a scale: margins grow until token labels fit, and free space is split between the sides. */
  frame({ sx, sy, spare = 1 }) {
    const { n, m } = this.page.layer, least = LABEL_STEP / THINNED, share = (s) => Math.max(0, Math.min((s - least + 0.5) / 0.5, 1));
    const left = CORNER + (this.full.left - CORNER) * share(sy), top = 32 + (Math.max(this.full.top, 32) - 32) * share(sx);
    const space = { w: Math.max(this.width - left - this.bars - 14, 40), h: Math.max(this.height - top - this.bars - 16, 40) };
    const half = (all, used) => (spare * Math.max(0, all - used)) / 2;
    return { left: left + half(space.w, m * sx), top: top + half(space.h, n * sy) * 0.4, space };
  }

  /** The largest scales at which the whole map is visible, with margins for the labels that fit at these scales. */
  fitScale() {
    if (this.minScale) return this.minScale;
    const { n, m } = this.page.layer, { space } = this.frame({ sx: 0, sy: 0 }), ratio = window.devicePixelRatio || 1;
    const x = space.w / m, y = space.h / n, s = Math.min(x, y), square = Math.max(n, m) <= 4 * Math.min(n, m) || s >= 12;
    const scales = (share) => ({ sx: Math.min(share * (square ? s : x), FIT), sy: Math.min(share * (square ? s : y), FIT) });
    const fits = ({ sx, sy }) => {
      const { w, h } = this.frame({ sx, sy }).space;
      return m * sx <= w + 1e-6 && n * sy <= h + 1e-6;
    };
    let low = 0, high = 1;
    if (fits(scales(1))) low = 1;
    for (let k = 0; k < 40 && low < 1; k++) {
      const middle = (low + high) / 2;
      if (fits(scales(middle))) low = middle;
      else high = middle;
    }
    const found = scales(low), whole = Math.floor(found.sx * ratio) / ratio;
    const scaled = n * m > EXACT_CELLS && found.sx === found.sy; // one image, sharp if its cells are whole pixels
    if (scaled && whole > 0.88 * found.sx) found.sx = found.sy = whole;
    return (this.minScale = found);
  }

  setView(view) {
    this.view = view;
    Object.assign(this, this.frame(view));
    this.canvas.style.touchAction = view.sx > this.fitScale().sx ? 'none' : 'pan-y'; // if the whole map is visible, touch scrolls the page
  }

  fit(smooth = true) { this.go({ x: 0, y: 0, ...this.fitScale() }, smooth); }

  clamp(view) {
    const { n, m } = this.page.layer, min = this.fitScale();
    const factor = Math.max(1, Math.min(view.sx / min.sx, Math.max(MAX_CELL / min.sx, MAX_CELL / min.sy, 1)));
    view.sx = min.sx * factor;
    view.sy = min.sy * factor;
    const { space } = this.frame(view);
    view.x = Math.max(0, Math.min(view.x, m - space.w / view.sx));
    view.y = Math.max(0, Math.min(view.y, n - space.h / view.sy));
    return view;
  }

  /** Move to a view, in 180 ms unless the reader prefers reduced motion. */
  go(target, smooth = true) {
    this.clamp(target);
    if (!smooth || !this.view || matchMedia('(prefers-reduced-motion: reduce)').matches) {
      this.moving = null;
      this.setView(target);
      return this.page.redraw();
    }
    const from = { ...this.view }, start = performance.now(), moving = (this.moving = {});
    const step = (now) => {
      if (this.moving !== moving) return;
      const t = Math.min(Math.max((now - start) / 180, 0), 1), eased = 1 - (1 - t) ** 3;
      const s = from.sx * (target.sx / from.sx) ** eased; // linear in the logarithm, so that the zoom has constant speed
      const share = Math.abs(target.sx - from.sx) < 1e-9 ? eased : (1 / from.sx - 1 / s) / (1 / from.sx - 1 / target.sx);
      this.setView({ sx: s, sy: s * (target.sy / target.sx), x: from.x + (target.x - from.x) * share, y: from.y + (target.y - from.y) * share });
      this.draw();
      if (t < 1) requestAnimationFrame(step);
      else this.setView(target);
    };
    requestAnimationFrame(step);
  }

  /** Zoom about the pointer, or else the selected token, or else the middle. */
  zoom(factor, event = null, smooth = true) {
    const v = this.view, min = this.fitScale(), { state, layer } = this.page;
    let px = Math.min(this.space.w, layer.m * v.sx) / 2, py = Math.min(this.space.h, layer.n * v.sy) / 2;
    if (event) [px, py] = this.inside(event);
    else if (state.pick) {
      const at = state.pick.at;
      if (state.pick.side !== 'key' && at >= v.y && at * v.sy <= (v.y * v.sy) + this.space.h) py = (at + 0.5 - v.y) * v.sy;
      if ((layer.self || state.pick.side === 'key') && at >= v.x && (at - v.x) * v.sx <= this.space.w) px = (at + 0.5 - v.x) * v.sx;
    }
    const most = Math.max(MAX_CELL / min.sx, MAX_CELL / min.sy, 1) * min.sx;
    const sx = Math.max(min.sx, Math.min(v.sx * factor, most)), sy = sx * (v.sy / v.sx), next = this.frame({ sx, sy });
    const [x, y] = [px + this.left - next.left, py + this.top - next.top]; // the same point of the screen in the next frame
    this.go({ sx, sy, x: v.x + px / v.sx - x / sx, y: v.y + py / v.sy - y / sy }, smooth);
  }

  /** Scroll a query or a key into view. */
  reveal(side, at) {
    const v = { ...this.view }, rows = this.space.h / v.sy, columns = this.space.w / v.sx;
    if (side !== 'key' && (at < v.y || at + 1 > v.y + rows)) v.y = at + 0.5 - rows / 2;
    if ((side !== 'query') && (at < v.x || at + 1 > v.x + columns)) v.x = at + 0.5 - columns / 2;
    if (v.x !== this.view.x || v.y !== this.view.y) this.go(v);
  }

  inside(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left - this.left, event.clientY - box.top - this.top];
  }

  /** The pair under the pointer: {i, j}, one of which is null beside the map; null outside both. */
  at(event) {
    const [x, y] = this.inside(event), { layer } = this.page, v = this.view;
    const j = Math.floor(v.x + x / v.sx), i = Math.floor(v.y + y / v.sy);
    const inX = x >= 0 && x < Math.min(this.space.w, (layer.m - v.x) * v.sx) && j < layer.m;
    const inY = y >= 0 && y < Math.min(this.space.h, (layer.n - v.y) * v.sy) && i < layer.n;
    return inX || inY ? { i: inY ? i : null, j: inX ? j : null } : null;
  }

  down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    this.dragged = this.pointers.size > 1;
  }

  move(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return this.page.hover(this.at(event));
    const dx = event.clientX - before.x, dy = event.clientY - before.y;
    if (!this.dragged && Math.hypot(dx, dy) < 4) return undefined;
    this.dragged = true;
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
    if (others.length) {
      const [other] = others, span = (p) => Math.max(Math.hypot(p.x - other.x, p.y - other.y), 8);
      const middle = { clientX: (event.clientX + other.x) / 2, clientY: (event.clientY + other.y) / 2 };
      this.zoom(span({ x: event.clientX, y: event.clientY }) / span(before), middle, false);
    }
    const v = this.view, half = others.length ? 0.5 : 1;
    this.go({ ...v, x: v.x - (half * dx) / v.sx, y: v.y - (half * dy) / v.sy }, false);
    this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    return undefined;
  }

  up(event) {
    const wasPressed = this.pointers.delete(event.pointerId);
    if (!wasPressed || this.dragged || event.type === 'pointercancel') return;
    const at = this.at(event);
    if (!at) this.page.pick(null);
    else if (at.i !== null) this.page.pick({ side: 'query', at: at.i }, false);
    else this.page.pick({ side: 'key', at: at.j }, false);
  }

  wheel(event) {
    if (this.page.narrow() && !event.ctrlKey) return; // in the narrow layout the page scrolls
    event.preventDefault();
    if (event.shiftKey) return this.go({ ...this.view, x: this.view.x + (event.deltaY || event.deltaX) / this.view.sx }, false);
    return this.zoom(2 ** (-event.deltaY * (event.deltaMode ? 0.05 : 0.0022) * (event.ctrlKey ? 3 : 1)), event, false);
  }

  draw() {
    const context = this.canvas.getContext('2d'), ratio = this.canvas.width / this.width || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    this.paint(context, ratio);
    this.page.drawLegend();
  }

  /** Draw the visible part of the map, its bars and its labels on a context, which belongs to the screen or to an export. */
  paint(context, ratio) {
    const { layer, state, themeColours } = this.page, v = this.view, head = state.head;
    const wide = Math.min(this.space.w, (layer.m - v.x) * v.sx), high = Math.min(this.space.h, (layer.n - v.y) * v.sy);
    const seen = { i0: Math.floor(v.y), i1: Math.min(Math.ceil(v.y + high / v.sy), layer.n), j0: Math.floor(v.x), j1: Math.min(Math.ceil(v.x + wide / v.sx), layer.m) };
    context.save();
    context.translate(this.left, this.top);
    context.save();
    context.beginPath();
    context.rect(0, 0, wide, high);
    context.clip();
    this.scale = this.drawCells(context, ratio, layer, head, seen, wide, high);
    this.drawMarks(context, layer, wide, high);
    context.restore();
    this.drawBars(context, layer, head, seen, wide, high);
    drawLabels(context, this, seen, wide, high);
    context.strokeStyle = themeColours.line;
    context.lineWidth = 1;
    context.strokeRect(-0.5, -0.5, wide + 1, high + 1);
    context.restore();
  }

  /** Draw the visible cells. Returns what the legend says of the colours: {most, exact, over, rows, columns}. */
  drawCells(context, ratio, layer, head, seen, wide, high) {
    const v = this.view, levels = layer.levels(head), { colours } = this.page;
    let at = levels.length - 1;
    while (at > 0 && (layer.n / levels[at].rows) * v.sy * ratio > 1.5) at--;
    const level = levels[at], over = !layer.whole && layer.pairs && seen.i1 - seen.i0 <= EXACT_ROWS && v.sy >= 0.6;
    if (over) context.globalAlpha = 0.55;
    const snap = (x) => Math.round(x * ratio) / ratio;
    const r0 = lastUpTo(level.i, seen.i0), r1 = lastUpTo(level.i, seen.i1 - 1) + 1;
    const c0 = lastUpTo(level.j, seen.j0), c1 = lastUpTo(level.j, seen.j1 - 1) + 1;
    if ((r1 - r0) * (c1 - c0) <= EXACT_CELLS) {
      const gap = v.sx >= 12 && layer.whole && at === 0 ? 1 : 0;
      for (let r = r0; r < r1; r++) {
        const y = snap((level.i[r] - v.y) * v.sy), h = snap((level.i[r + 1] - v.y) * v.sy) - y;
        for (let c = c0; c < c1; c++) {
          const x = snap((level.j[c] - v.x) * v.sx), w = snap((level.j[c + 1] - v.x) * v.sx) - x;
          context.fillStyle = cssColour(colours[paletteIndex(level.data[r * level.columns + c], level.most)]);
          context.fillRect(x, y, w - gap, h - gap);
        }
      }
    } else {
      const name = `${layer.name} ${head} ${at}`;
      if (!this.painted.has(name)) {
        if (this.painted.size > 12) this.painted.clear();
        this.painted.set(name, paintLevel(level, colours));
      }
      const image = this.painted.get(name), y = (layer.n / levels[0].rows) * 2 ** at * v.sy, x = (layer.m / levels[0].columns) * 2 ** at * v.sx;
      context.imageSmoothingEnabled = x * ratio < 1;
      context.drawImage(image, snap(-v.x * v.sx), snap(-v.y * v.sy), image.width * x, image.height * y);
    }
    context.globalAlpha = 1;
    if (over) this.drawExactPairs(context, layer, head, seen);
    return { most: level.most, exact: layer.whole && at === 0, over, rows: layer.n / level.rows, columns: layer.m / level.columns };
  }

  /** Draw the exact entries over pooled cells. */
  drawExactPairs(context, layer, head, seen) {
    const v = this.view, { colours } = this.page, w = Math.max(v.sx, 1), h = Math.max(v.sy, 1);
    for (let i = seen.i0; i < seen.i1; i++) {
      for (const { at, weight } of layer.row(head, i, Infinity)) {
        if (at < seen.j0 || at >= seen.j1) continue;
        context.fillStyle = cssColour(colours[paletteIndex(weight, 1)]);
        context.fillRect((at - v.x) * v.sx, (i - v.y) * v.sy, w, h);
      }
    }
  }

  /** Mark the row and the column of the selected token and of the pointer. */
  drawMarks(context, layer, wide, high) {
    const v = this.view, { state, themeColours } = this.page, pick = state.pick, over = state.hover;
    const row = (i, colour, width) => {
      if (i === null || i === undefined) return;
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.strokeRect(-2, Math.round((i - v.y) * v.sy) + 0.5 - width / 2, wide + 4, Math.max(v.sy, 2) + width - 1);
    };
    const column = (j, colour, width) => {
      if (j === null || j === undefined) return;
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.strokeRect(Math.round((j - v.x) * v.sx) + 0.5 - width / 2, -2, Math.max(v.sx, 2) + width - 1, high + 4);
    };
    if (over) {
      row(over.i, themeColours.cross, 1);
      column(over.j, themeColours.cross, 1);
    }
    const active = pick ?? (over ? null : this.page.last), width = pick ? 1.5 : 1;
    if (active) {
      if (active.side === 'query' || layer.self) row(active.at, themeColours.blue, width);
      if (active.side === 'key' || layer.self) column(active.at, themeColours.orange, width);
    }
  }

  /** Draw bars of the entropy at the right and of the received weight below; a pixel with several positions shows their mean. */
  drawBars(context, layer, head, seen, wide, high) {
    const v = this.view, { themeColours } = this.page, space = this.bars - 12;
    const bars = (values, scale, from, length, draw) => {
      const step = Math.max(scale, 1), most = largest(values) || 1;
      for (let p = scale >= 1 ? -((from - Math.floor(from)) * scale) : 0; p < length; p += step) {
        const first = Math.max(Math.floor(from + p / scale + 1e-6), 0), end = Math.min(Math.max(Math.floor(from + (p + step) / scale + 1e-6), first + 1), values.length);
        let sum = 0;
        for (let k = first; k < end; k++) sum += values[k];
        const at = Math.round(p), size = Math.max(Math.round(p + step) - at - (step > 4 ? 1 : 0), 1); // whole pixels, without gaps
        if (end > first) draw(at, size, sum / (end - first) / most);
      }
    };
    context.save();
    context.beginPath();
    context.rect(wide + 6, 0, this.bars, high);
    context.rect(0, high + 6, wide, this.bars);
    context.clip();
    context.fillStyle = themeColours.blue;
    context.globalAlpha = 0.75;
    bars(layer.entropy(head), v.sy, v.y, high, (p, size, share) => context.fillRect(wide + 7, p, share * space, size));
    context.fillStyle = themeColours.orange;
    bars(layer.received(head), v.sx, v.x, wide, (p, size, share) => context.fillRect(p, high + 7, size, Math.sqrt(share) * space));
    context.restore();
    context.fillStyle = themeColours.muted;
    context.font = `10px ${themeColours.font}`;
    context.textAlign = 'left';
    context.textBaseline = 'bottom';
    context.fillText('entropy', wide + 7, -5);
    context.textBaseline = 'top';
    context.fillText('received', wide + 7, high + 8);
  }
}

/** The index of the last of ascending edges that is ≤ value. */
function lastUpTo(edges, value) {
  let low = 0, high = edges.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (edges[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}

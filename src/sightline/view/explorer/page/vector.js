// A canvas context that writes SVG, which is sharp at any size. It has only the methods that the map calls.

const ESCAPES = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' };
const escaped = (text) => String(text).replace(/[&<>"]/gu, (sign) => ESCAPES[sign]).replace(/[\u0000-\u0008\u000b-\u001f]/gu, '\ufffd');
const BASELINES = { top: '0.8em', middle: '0.35em', bottom: '-0.2em' };
const ANCHORS = { center: 'middle', right: 'end' };
const STATE_FIELDS = ['fillStyle', 'strokeStyle', 'lineWidth', 'globalAlpha', 'font', 'textAlign', 'textBaseline', 'imageSmoothingEnabled'];

class VectorContext {
  constructor() {
    Object.assign(this, { fillStyle: '#000', strokeStyle: '#000', lineWidth: 1, globalAlpha: 1, font: '10px sans-serif', textAlign: 'left', textBaseline: 'alphabetic', imageSmoothingEnabled: true });
    Object.assign(this, { marks: [], open: [0], states: [], clips: 0, path: [], ruler: make('canvas').getContext('2d') });
  }

  save() {
    this.states.push(Object.fromEntries(STATE_FIELDS.map((name) => [name, this[name]])));
    this.open.push(0);
  }

  restore() {
    this.marks.push('</g>'.repeat(this.open.pop()));
    Object.assign(this, this.states.pop());
  }

  group(attributes) {
    this.marks.push(`<g ${attributes}>`);
    this.open[this.open.length - 1]++;
  }

  translate(x, y) { this.group(`transform="translate(${x} ${y})"`); }
  rotate(angle) { this.group(`transform="rotate(${(angle * 180) / Math.PI})"`); }
  beginPath() { this.path = []; }
  rect(...corners) { this.path.push(corners); }

  clip() {
    const name = `clip${this.clips++}`;
    this.marks.push(`<clipPath id="${name}">${this.path.map((corners) => `<rect ${this.box(...corners)}/>`).join('')}</clipPath>`);
    this.group(`clip-path="url(#${name})"`);
  }

  box(x, y, width, height) { return `x="${x}" y="${y}" width="${Math.max(width, 0)}" height="${Math.max(height, 0)}"`; }
  alpha() { return this.globalAlpha < 1 ? ` opacity="${this.globalAlpha}"` : ''; }
  fillRect(...corners) { this.marks.push(`<rect ${this.box(...corners)} fill="${this.fillStyle}"${this.alpha()}/>`); }
  strokeRect(...corners) { this.marks.push(`<rect ${this.box(...corners)} fill="none" stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}"${this.alpha()}/>`); }

  fillText(text, x, y) {
    const places = `x="${x}" y="${y}" dy="${BASELINES[this.textBaseline] ?? 0}" text-anchor="${ANCHORS[this.textAlign] ?? 'start'}"`;
    this.marks.push(`<text ${places} fill="${this.fillStyle}" style="font:${escaped(this.font)}" xml:space="preserve">${escaped(text)}</text>`);
  }

  measureText(text) {
    this.ruler.font = this.font;
    return this.ruler.measureText(text);
  }

  drawImage(image, ...corners) {
    const sharp = this.imageSmoothingEnabled ? '' : ' style="image-rendering:pixelated"';
    this.marks.push(`<image ${this.box(...corners)} preserveAspectRatio="none"${sharp}${this.alpha()} href="${image.toDataURL()}"/>`);
  }

  text(width, height) {
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">${this.marks.join('\n')}</svg>`;
  }
}

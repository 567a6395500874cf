// Decoding of base64 arrays, formatting of numbers and tokens, and colours.

/** The bytes of base64 text. */
function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let k = 0; k < binary.length; k++) bytes[k] = binary.charCodeAt(k);
  return bytes;
}

/** The numbers of a stored array: base64 of compressed bytes, with the first bytes of all numbers before the second bytes. float16 is widened. */
function decode(stored, read) {
  const length = stored.shape.reduce((product, size) => product * size, 1), size = Number(stored.type[1]);
  const planes = inflate(bytesOf(read(stored.at)), length * size);
  if (stored.type === 'u1') return planes;
  const bytes = new Uint8Array(planes.length); // little-endian, as on every machine with a browser
  for (let place = 0; place < size; place++) {
    for (let k = 0; k < length; k++) bytes[k * size + place] = planes[place * length + k];
  }
  if (stored.type !== 'f2') return new { u2: Uint16Array, f4: Float32Array, i4: Int32Array }[stored.type](bytes.buffer);
  return Float32Array.from(new Uint16Array(bytes.buffer), (bits) => float16Table()[bits]);
}

/** The value of every float16 by its bits, computed once. */
let float16Cache = null;
function float16Table() {
  if (float16Cache) return float16Cache;
  float16Cache = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const exponent = (bits >> 10) & 31, fraction = bits & 1023, sign = bits >> 15 ? -1 : 1;
    float16Cache[bits] = sign * (exponent === 0 ? fraction * 2 ** -24
      : exponent === 31 ? (fraction ? NaN : Infinity) : (1 + fraction / 1024) * 2 ** (exponent - 15));
  }
  return float16Cache;
}

/** A number with three significant digits, as the page writes every weight. */
function digits(value) {
  if (value === 0) return '0';
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString('en');
  if (Math.abs(value) < 1e-4) return value.toExponential(2).replace('-', '−');
  return value.toPrecision(3).replace('-', '−');
}

/** A rounded number and its largest error, as texts with equally many decimals. The error is empty if it does not change the first three digits. */
function roundedDigits(value, error) {
  if (error < 10 ** (Math.floor(Math.log10(value)) - 3)) return [digits(value), ''];
  const decimals = Math.max(0, Math.min(Math.ceil(-Math.log10(error) - 1e-9), 12)), unit = 10 ** -decimals;
  const text = value.toFixed(decimals), most = error + Math.abs(value - Number(text)); // the writing rounds once more
  return [text, (Math.ceil(most / unit - 1e-9) * unit).toFixed(decimals)];
}

const count = (number) => number.toLocaleString('en');

/** The name of a position on an axis that has no space for all tokens: the time of a frame of audio, else its number. */
const positionName = (tokens, at) => (/^\d+\.\d\d s$/u.test(tokens[at]) ? tokens[at] : count(at));

/** A token as it is displayed, with visible signs for newlines, tabs and spaces; one space between words stays. */
function visible(token) {
  const bare = token.replace(/^[Ġ▁ ]+(?=.)/u, '');
  const spaced = bare.replace(/[Ġ▁\u00a0]|(?<!\S) | (?!\S)/gu, '␣');
  return spaced.replace(/\n|Ċ/gu, '⏎').replace(/\t/gu, '⇥') || '∅';
}

/** True if the tokens are WordPiece's, which mark the continuation of a word; other tokenizers mark its beginning. */
const isWordPiece = (tokens) => !tokens.some((token) => /^[Ġ▁ ]/u.test(token));

/** True if a space precedes a token. */
function hasSpaceBefore(token, pieces) {
  return /^[Ġ▁ ]/u.test(token) || (pieces && !token.startsWith('##'));
}

/** 256 colours interpolated between anchors, as [red, green, blue]. */
function ramp(anchors) {
  return Array.from({ length: 256 }, (_, k) => {
    const at = (k / 255) * (anchors.length - 1), low = Math.min(Math.floor(at), anchors.length - 2);
    return anchors[low].map((from, channel) => Math.round(from + (anchors[low + 1][channel] - from) * (at - low)));
  });
}

const SCALES = {
  root: ['√ weight', (x) => Math.sqrt(x)],
  linear: ['linear', (x) => x],
  log: ['logarithm', (x) => (x <= 1e-4 ? 0 : 1 + Math.log10(x) / 4)],
};

/** 1025 colours as ImageData stores them, 32 bits each: entry 0 for exactly 0, entry k for the share (k / 1024)². */
function palette({ hidden, weights }, scale) {
  const colours = ramp(weights);
  const packed = new Uint32Array(1025), pack = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  packed[0] = pack(hidden);
  for (let k = 1; k <= 1024; k++) {
    packed[k] = pack(colours[Math.round(255 * Math.min(Math.max(SCALES[scale][1]((k / 1024) ** 2), 0), 1))]);
  }
  return packed;
}

const cssColour = (packed) => `rgb(${packed & 255},${(packed >> 8) & 255},${(packed >> 16) & 255})`;

/** The index into a palette for a value, where `most` is the largest value: steps of the root keep small values apart. */
function paletteIndex(value, most) {
  return value > 0 ? Math.max(1, Math.min(1024, Math.round(1024 * Math.sqrt(value / most)))) : 0;
}

/** An element with a class, attributes and children; strings become text nodes, never HTML. */
function make(tag, cls = '', attributes = {}, ...children) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// One layer: the weights of pairs, rows and columns, and the levels of its map from fine to coarse.

const DECODED_HEADS = 4; // number of heads of each layer whose decoded maps are kept

class Layer {
  constructor(manifest, stored, read) {
    Object.assign(this, { name: stored.name, short: stored.short, how: stored.how, stored, read, cache: {}, heads: stored.cells.shape[0] });
    this.decoded = new Map(); // levels of the heads that were read last
    this.queries = manifest.tokens[stored.queries];
    this.keys = manifest.tokens[stored.keys];
    this.self = stored.queries === stored.keys;
    this.n = this.queries.length;
    this.m = this.keys.length;
    this.whole = this.how === 'whole';
  }

  /** A stored array, decoded once and cached. Rounded numbers, except in 'cells', are replaced by the values that they stand for. */
  array(name, part = null) {
    const stored = part ? this.stored[name][part] : this.stored[name];
    return (this.cache[part ? `${name}.${part}` : name] ??= name === 'cells' ? decode(stored, this.read) : unrounded(stored, decode(stored, this.read)));
  }

  /** A head's number in the model, which differs from its index if only some heads were watched. */
  headName(head) { return this.stored.heads?.[head] ?? head; }

  part(name, head, length) {
    return this.array(name).subarray(head * length, (head + 1) * length);
  }

  entropy(head) { return this.part('entropy', head, this.n); }
  received(head) { return this.part('received', head, this.m); }

  /** The cells of one head, column by column as the page stores them. Rounded cells are replaced by the values that they stand for. */
  cells(head) {
    const [, columns, rows] = this.stored.cells.shape, stored = this.part('cells', head, rows * columns);
    const data = unrounded({ ...this.stored.cells, scales: [this.stored.cells.scales?.[head]] }, stored);
    return { rows, columns, data };
  }

  /** A map of a head with at most `most` cells on a side. Every cell has the mean, or the maximum, of equally many stored cells. */
  small(head, most) {
    const { rows, columns, data } = this.cells(head), size = Math.ceil(Math.max(rows, columns) / most), maxima = this.how === 'max';
    const found = { rows: Math.ceil(rows / size), columns: Math.ceil(columns / size) };
    found.data = new Float32Array(found.rows * found.columns);
    for (let c = 0, from = 0; c < columns; c++) {
      const wide = Math.min(size, columns - (c - (c % size)));
      for (let r = 0, to = Math.floor(c / size); r < rows; to += found.columns) {
        const end = Math.min(r + size, rows), area = wide * (end - r);
        let sum = 0, top = found.data[to];
        for (; r < end; r++, from++) {
          sum += data[from];
          if (data[from] > top) top = data[from];
        }
        found.data[to] = maxima ? top : found.data[to] + sum / area;
      }
    }
    return Object.assign(found, { most: largest(found.data) || 1 });
  }

  /** Levels of one head's map, each half as fine as the previous one: {rows, columns, data, i, j, most}; i and j are the cells' edges. */
  levels(head) {
    if (this.decoded.has(head)) return this.decoded.get(head);
    const { rows, columns, data: stored } = this.cells(head), data = new Float32Array(stored.length);
    for (let c = 0, from = 0; c < columns; c++) {
      for (let r = 0, to = c; r < rows; r++, from++, to += columns) data[to] = stored[from];
    }
    const edges = (cells, length) => Uint32Array.from({ length: cells + 1 }, (_, k) => Math.floor((k * length) / cells));
    const found = [{ rows, columns, data, i: edges(rows, this.n), j: edges(columns, this.m) }];
    while (Math.max(found.at(-1).rows, found.at(-1).columns) > 24) found.push(halveLevel(found.at(-1), this.how === 'max'));
    for (const level of found) level.most = largest(level.data) || 1;
    if (this.decoded.size === DECODED_HEADS) this.decoded.delete(this.decoded.keys().next().value);
    this.decoded.set(head, found);
    return found;
  }

  /** The weight of a pair: {value}, or an upper bound {below} if the page does not store this weight. */
  weight(head, i, j) {
    if (this.whole) return { value: this.levels(head)[0].data[i * this.m + j] };
    const row = this.row(head, i, Infinity), found = row.find((entry) => entry.at === j);
    if (found) return { value: found.weight };
    if (!this.pairs || row.length < this.pairs.shape[2]) return { below: this.pairs ? 0 : 1 };
    return { below: upperBound(this.pairs, head, row.at(-1).weight) };
  }

  /** The record of the stored weights of pairs; undefined if the page stores none. */
  get pairs() { return this.whole ? this.stored.cells : this.stored.looks?.weights; }

  /** A weight as the page writes it: [number, error], with an empty error if the number is exact or an upper bound. */
  formatWeight(head, weight) { return formatNumber(this.pairs, head, weight); }

  /** The `most` heaviest keys of query i: [{at, weight}], in descending order. */
  row(head, i, most) {
    if (!this.whole) return this.linked('looks', head, i, most);
    const data = this.levels(head)[0].data;
    return heaviest(this.m, (j) => data[i * this.m + j], most);
  }

  /** The `most` heaviest queries of key j: [{at, weight}], in descending order. */
  column(head, j, most) {
    if (this.whole) {
      const data = this.levels(head)[0].data;
      return heaviest(this.n, (i) => data[i * this.m + j], most);
    }
    return this.stored.seen_by ? this.linked('seen_by', head, j, most) : this.found(head).get(j)?.slice(0, most) ?? [];
  }

  linked(name, head, at, most) {
    if (!this.stored[name]) return [];
    const [, length, k] = this.stored[name].weights.shape, start = (head * length + at) * k;
    const weights = this.array(name, 'weights'), where = this.array(name, 'where'), found = [];
    for (let e = start; e < start + Math.min(k, most) && weights[e] > 0; e++) found.push({ at: where[e], weight: weights[e] });
    return found;
  }

  /** The queries of each key, found among the heaviest keys of each query. */
  found(head) {
    if (this.foundHead === head) return this.foundQueries;
    const found = new Map();
    for (let i = 0; i < this.n; i++) {
      for (const { at, weight } of this.linked('looks', head, i, Infinity)) {
        if (!found.has(at)) found.set(at, []);
        found.get(at).push({ at: i, weight });
      }
    }
    for (const queries of found.values()) queries.sort((a, z) => z.weight - a.weight || a.at - z.at);
    Object.assign(this, { foundHead: head, foundQueries: found });
    return found;
  }
}

/** The numbers of a stored array. With `levels`, a stored k stands for scale · (k / levels)², with one scale for each head. */
function unrounded({ levels: count, scales }, stored) {
  if (!count) return stored;
  const data = new Float32Array(stored.length), length = stored.length / scales.length;
  scales.forEach((scale, head) => {
    const values = Float32Array.from({ length: count + 1 }, (_, k) => scale * (k / count) ** 2);
    for (let k = head * length; k < (head + 1) * length; k++) data[k] = values[stored[k]];
  });
  return data;
}

/** The largest number that rounding may have turned into this value of a stored array. */
function upperBound({ levels: count, scales }, head, value) {
  return count ? scales[head] * (Math.sqrt(value / scales[head]) + 0.5 / count) ** 2 : value;
}

/** A number of a stored array as the page writes it: [number, error]. The error is empty if the number is exact or an upper bound. */
function formatNumber(stored, head, value) {
  if (!stored?.levels || value === 0) return [digits(value), ''];
  const count = stored.levels, scale = stored.scales[head], level = Math.round(count * Math.sqrt(value / scale));
  if (level === 1) return [`≤ ${digits((2.26 * scale) / count ** 2)}`, '']; // level 1 stands for all small numbers above 0
  return roundedDigits(value, (scale * (level + 0.25)) / count ** 2);
}

/** The largest of numbers, at least 0. */
function largest(values) {
  let most = 0;
  for (const value of values) if (value > most) most = value;
  return most;
}

/** The `most` heaviest entries above 0 in descending order; of equal entries the first position comes first. */
function heaviest(length, value, most) {
  const found = [];
  for (let at = 0; at < length; at++) if (value(at) > 0) found.push({ at, weight: value(at) });
  found.sort((a, z) => z.weight - a.weight || a.at - z.at);
  return most < found.length ? found.slice(0, most) : found;
}

/** A level with half as many rows and columns. Its cells are maxima, or means weighted by area. */
function halveLevel({ rows, columns, data, i, j }, maxima) {
  const everySecond = (edges, cells) => Uint32Array.from({ length: cells + 1 }, (_, k) => edges[Math.min(2 * k, edges.length - 1)]);
  const half = { rows: (rows + 1) >> 1, columns: (columns + 1) >> 1 };
  half.i = everySecond(i, half.rows);
  half.j = everySecond(j, half.columns);
  half.data = new Float32Array(half.rows * half.columns);
  for (let r = 0; r < half.rows; r++) {
    for (let c = 0; c < half.columns; c++) {
      let sum = 0, area = 0, most = 0;
      for (let y = 2 * r; y < Math.min(2 * r + 2, rows); y++) {
        for (let x = 2 * c; x < Math.min(2 * c + 2, columns); x++) {
          const value = data[y * columns + x], size = (i[y + 1] - i[y]) * (j[x + 1] - j[x]);
          sum += value * size;
          area += size;
          if (value > most) most = value;
        }
      }
      half.data[r * half.columns + c] = maxima ? most : area ? sum / area : 0;
    }
  }
  return half;
}

/** A canvas with one pixel for each cell of a level. */
function paintLevel(level, colours) {
  const image = new ImageData(level.columns, level.rows), pixels = new Uint32Array(image.data.buffer);
  for (let k = 0; k < pixels.length; k++) pixels[k] = colours[paletteIndex(level.data[k], level.most)];
  const canvas = make('canvas');
  canvas.width = level.columns;
  canvas.height = level.rows;
  canvas.getContext('2d').putImageData(image, 0, 0);
  return canvas;
}

// Decompression of DEFLATE data, RFC 1951. DecompressionStream does the same, but some browsers lack it, and it returns the
// bytes later. `inflate` returns the bytes at once, so that the page is complete as soon as it has loaded.

const LENGTH_BASES = [3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258];
const LENGTH_BITS = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0];
const DISTANCE_BASES = [1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577];
const DISTANCE_BITS = [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13];
const CODE_LENGTH_ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/** The table of a Huffman code with these code lengths. Entry `bits` is for the symbol whose code `bits` begin with: 16 · symbol + code length. */
function huffmanTable(lengths) {
  const most = Math.max(1, ...lengths), table = new Uint16Array(1 << most);
  let code = 0;
  for (let length = 1; length <= most; length++, code <<= 1) {
    for (let symbol = 0; symbol < lengths.length; symbol++) {
      if (lengths[symbol] !== length) continue;
      let reversed = 0; // codes are stored from their highest bit on, other numbers from their lowest
      for (let k = 0; k < length; k++) reversed |= ((code >> k) & 1) << (length - 1 - k);
      for (let at = reversed; at < table.length; at += 1 << length) table[at] = (symbol << 4) | length;
      code++;
    }
  }
  return table;
}

/** The tables of literals and distances that a block begins with. */
function readTables(take, symbol) {
  const counts = [take(5) + 257, take(5) + 1], shortLengths = new Array(19).fill(0), lengths = [];
  for (let k = take(4) + 4, place = 0; place < k; place++) shortLengths[CODE_LENGTH_ORDER[place]] = take(3);
  const table = huffmanTable(shortLengths);
  while (lengths.length < counts[0] + counts[1]) {
    const code = symbol(table);
    if (code < 16) lengths.push(code);
    else {
      const repeated = code === 16 ? lengths.at(-1) : 0;
      for (let k = code === 16 ? take(2) + 3 : code === 17 ? take(3) + 3 : take(7) + 11; k > 0; k--) lengths.push(repeated);
    }
  }
  return [huffmanTable(lengths.slice(0, counts[0])), huffmanTable(lengths.slice(counts[0]))];
}

/** The tables of a block that has none of its own. */
function fixedTables() {
  const lengths = Array.from({ length: 288 }, (_, k) => (k < 144 ? 8 : k < 256 ? 9 : k < 280 ? 7 : 8));
  return [huffmanTable(lengths), huffmanTable(new Array(30).fill(5))];
}

/** The `size` bytes that DEFLATE data stand for. Throws an error if the data are damaged. */
function inflate(data, size) {
  const out = new Uint8Array(size);
  let at = 0, bits = 0, held = 0, to = 0, last = false; // `held` bits of the data are in `bits`

  const need = (count) => {
    while (held < count) {
      bits |= (data[at++] ?? 0) << held; // zeros after the end, because a table is read by its longest code
      held += 8;
    }
  };
  const take = (count) => {
    need(count);
    const value = bits & ((1 << count) - 1);
    bits >>>= count;
    held -= count;
    return value;
  };
  const symbol = (table) => {
    need(15);
    const entry = table[bits & (table.length - 1)], length = entry & 15;
    if (!length) throw new Error('The data of this page are damaged: a code without a symbol.');
    bits >>>= length;
    held -= length;
    return entry >> 4;
  };

  while (!last) {
    last = take(1) === 1;
    const kind = take(2);
    if (kind === 0) {
      take(held & 7);
      const length = take(16);
      take(16);
      for (let k = 0; k < length; k++) out[to++] = take(8);
    } else {
      const [literals, distances] = kind === 1 ? fixedTables() : readTables(take, symbol);
      for (let code = symbol(literals); code !== 256 && to <= size; code = symbol(literals)) {
        if (code < 256) out[to++] = code;
        else {
          const length = LENGTH_BASES[code - 257] + take(LENGTH_BITS[code - 257]), place = symbol(distances);
          const distance = DISTANCE_BASES[place] + take(DISTANCE_BITS[place]);
          for (const end = to + length; to < end; to++) out[to] = out[to - distance];
        }
      }
    }
    if (to > size || at > data.length + 4) throw new Error('The data of this page are damaged: a wrong length.');
  }
  if (to !== size) throw new Error('The data of this page are damaged: a wrong length.');
  return out;
}

// The labels of the large map's axes: tokens where they fit, else every second or third token, else positions or times.

const LABEL_STEP = 11.5; // least distance of token labels in pixels
const THINNED = 3; // largest step between labelled tokens; if labels of every third token do not fit, positions are labelled
const NAME_SPACE = 62; // space of a token between positions in pixels
const CORNER = 50; // least width at the left in pixels, for positions and for the words in the corner

/** The step between the positions that are labelled at a scale, and whether the labels are tokens. */
function labelling(scale) {
  const thinned = Math.ceil(LABEL_STEP / scale - 1e-6);
  if (thinned <= THINNED) return { tokens: true, step: thinned };
  const steps = Array.from({ length: 21 }, (_, k) => [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3));
  return { tokens: false, step: steps.find((step) => step * scale >= 46) ?? 1e7 };
}

/** Draw labels beside and above the map: the tokens, or every second or third token, or positions. Marked tokens always have labels. */
function drawLabels(context, map, seen, wide, high) {
  const v = map.view, { layer, themeColours, state } = map.page, over = state.hover, pick = state.pick ?? (over ? null : map.page.last);
  const marked = (side) => [pick && (pick.side === side || layer.self) ? pick.at : null, over && (side === 'query' ? over.i : over.j)].filter((at) => at !== null && at !== undefined);
  const font = (size) => { context.font = `${size}px ${themeColours.font}`; };
  const side = (name, tokens, scale, from, to, start, length, draw) => {
    const labels = labelling(scale), near = name === 'key' && !labels.tokens ? NAME_SPACE : LABEL_STEP - 0.5;
    const chosen = marked(name).filter((at, k, all) => all.slice(k + 1).every((other) => Math.abs(at - other) * scale >= near));
    font(labels.tokens ? Math.max(Math.min(scale * labels.step - 1.5, 11), 10) : 10);
    const inside = (at) => at >= from && at < to && (at + 0.5 - start) * scale >= 0 && (at + 0.5 - start) * scale <= length;
    const label = (at, colour, text) => {
      context.fillStyle = colour;
      draw((at + 0.5 - start) * scale, text, labels);
    };
    for (let at = Math.ceil(from / labels.step) * labels.step; at < to; at += labels.step) {
      const free = chosen.every((other) => at !== other && Math.abs(at - other) * scale >= near);
      if (inside(at) && free) label(at, themeColours.muted, labels.tokens ? visible(tokens[at]) : positionName(tokens, at));
    }
    for (const at of chosen) if (inside(at)) label(at, themeColours.ink, visible(tokens[at]));
  };
  context.textBaseline = 'middle';
  side('query', layer.queries, v.sy, seen.i0, seen.i1, v.y, high, (y, text) => {
    context.textAlign = 'right';
    context.fillText(cut(context, text, map.left - 12), -7, y);
  });
  side('key', layer.keys, v.sx, seen.j0, seen.j1, v.x, wide, (x, text, labels) => {
    const rotated = labels.tokens && v.sx < map.widest + 6;
    context.save();
    context.translate(x, -7);
    if (rotated) context.rotate(-Math.PI / 2);
    context.textAlign = rotated ? 'left' : 'center';
    context.fillText(cut(context, text, rotated ? map.top - 12 : Math.max(v.sx, 1.4 * NAME_SPACE)), 0, rotated ? 0 : -2);
    context.restore();
  });
  font(10);
  context.fillStyle = themeColours.muted;
  context.textAlign = 'right';
  context.fillText('key →', -7, -25);
  context.fillText('query ↓', -7, -13);
}

/** The text, cut with … to a width of `space` pixels. */
function cut(context, text, space) {
  if (context.measureText(text).width <= space) return text;
  let length = Math.max(Math.floor(text.length * space / context.measureText(text).width), 1);
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > space) length--;
  return `${text.slice(0, length)}…`;
}

// The text: every token can be hovered over and clicked. A token's shade is its weight as a key of the active token, and
// its underline its weight as a query. Lines are laid out once; only the visible lines are elements of the page.

const LINE = 30; // height of a line in pixels
const MOST_LINES = 4, SCROLLED_LINES = 3; // most lines of a text that does not scroll; visible lines of a text that scrolls

class Strip {
  constructor(page, side) {
    this.page = page;
    this.side = side; // 'query', 'key', or 'both' in self-attention
    this.body = make('div', 'sl-strip-body');
    this.scroller = make('div', 'sl-strip-scroll', { tabindex: '0', role: 'listbox' }, this.body);
    this.heading = make('h2');
    this.node = make('section', 'sl-strip', {}, this.heading, this.scroller);
    this.scroller.addEventListener('scroll', () => this.renderVisibleLines(), { passive: true });
    const tokenNode = (event) => event.target.closest?.('[data-at]');
    this.body.addEventListener('pointerover', (event) => {
      const token = tokenNode(event);
      page.hover(token ? this.spot(Number(token.dataset.at)) : null);
    });
    this.body.addEventListener('pointerleave', () => page.hover(null));
    this.body.addEventListener('click', (event) => {
      const token = tokenNode(event);
      page.pick(token ? { side: this.side === 'key' ? 'key' : 'query', at: Number(token.dataset.at) } : null);
    });
  }

  spot(at) {
    return { i: this.side === 'key' ? null : at, j: this.side === 'query' ? null : at, strip: true };
  }

  reset(tokens, title) {
    this.tokens = tokens;
    this.heading.textContent = title;
    this.heading.hidden = this.side === 'both';
    this.scroller.setAttribute('aria-label', title);
    this.layout();
  }

  /** Break the tokens into lines by their widths. */
  layout() {
    const context = (this.measure ??= make('canvas').getContext('2d')), space = this.scroller.clientWidth - 24;
    context.font = `15px ${this.page.themeColours.font}`;
    const widths = new Map(), pieces = isWordPiece(this.tokens);
    this.lines = [];
    this.lineOf = new Uint32Array(this.tokens.length);
    let line = [], x = 0;
    this.tokens.forEach((token, at) => {
      const shown = this.shown(token);
      if (!widths.has(shown)) widths.set(shown, context.measureText(shown).width + 3);
      const gap = line.length && hasSpaceBefore(token, pieces) ? 5 : 0, width = Math.min(widths.get(shown), space);
      if (line.length && x + gap + width > space) {
        this.lines.push(line);
        [line, x] = [[], 0];
      }
      line.push({ at, shown, x: x + (line.length ? gap : 0), width });
      x += (line.length > 1 ? gap : 0) + width;
      this.lineOf[at] = this.lines.length;
      if (/\n|Ċ/u.test(token)) {
        this.lines.push(line);
        [line, x] = [[], 0];
      }
    });
    if (line.length) this.lines.push(line);
    this.body.style.height = `${this.lines.length * LINE + 6}px`;
    this.scroller.style.height = `${(this.lines.length > MOST_LINES ? SCROLLED_LINES : this.lines.length) * LINE + 6}px`;
    this.rows = new Map();
    this.body.replaceChildren();
    this.renderVisibleLines();
  }

  shown(token) {
    const text = visible(token);
    return text.startsWith('##') && text.length > 2 ? text.slice(2) : text;
  }

  /** Create the elements of the visible lines and of two lines above and below them; remove the others. */
  renderVisibleLines() {
    if (!this.lines) return;
    const from = Math.max(Math.floor(this.scroller.scrollTop / LINE) - 2, 0);
    const to = Math.min(Math.ceil((this.scroller.scrollTop + this.scroller.clientHeight) / LINE) + 2, this.lines.length);
    for (const [line, row] of this.rows) {
      if (line >= from && line < to) continue;
      row.remove();
      this.rows.delete(line);
    }
    for (let line = from; line < to; line++) {
      if (this.rows.has(line)) continue;
      const row = make('div', 'sl-line');
      row.style.top = `${line * LINE + 4}px`;
      for (const { at, shown, x, width } of this.lines[line]) {
        const token = make('span', 'sl-token', { 'data-at': at, role: 'option', title: `${this.tokens[at]}   (${at})` }, shown);
        token.style.left = `${x}px`;
        token.style.width = `${width}px`;
        row.append(token);
      }
      this.rows.set(line, row);
      this.body.append(row);
    }
    this.shade();
  }

  reveal(at) {
    const y = this.lineOf[at] * LINE, { scrollTop, clientHeight } = this.scroller;
    if (y < scrollTop || y + LINE > scrollTop + clientHeight) this.scroller.scrollTop = y - clientHeight / 2 + LINE / 2;
  }

  /** Colour the visible tokens by page.linked, which maps positions to weights. */
  shade() {
    const { linked, state } = this.page, active = this.page.active(), found = this.page.matches?.[this.side];
    for (const row of this.rows.values()) {
      for (const token of row.children) {
        const at = Number(token.dataset.at), looks = this.side === 'query' ? 0 : linked.looks.get(at) ?? 0;
        const seen = this.side === 'key' ? 0 : linked.seen.get(at) ?? 0;
        const isHere = (spot) => spot && (this.side === 'both' || spot.side === this.side) && spot.at === at;
        token.style.setProperty('--looks', `${55 * strength(looks / linked.most.looks)}%`);
        token.style.setProperty('--seen', `${100 * strength(seen / linked.most.seen)}%`);
        token.classList.toggle('is-picked', Boolean(isHere(state.pick)));
        token.ariaSelected = String(Boolean(isHere(state.pick)));
        token.classList.toggle('is-active', Boolean(isHere(active)));
        token.classList.toggle('is-found', Boolean(found?.has(at)));
      }
    }
  }
}

/** The opacity for a share of the heaviest weight; shares under 0.02 get 0. */
function strength(share) {
  return share < 0.02 ? '0' : (share ** 0.6).toFixed(3);
}

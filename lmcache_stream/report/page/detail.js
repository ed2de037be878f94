// Where two texts part, not within a character.
function commonLength(one, other) {
  let length = 0;
  while (length < one.length && length < other.length && one[length] === other[length]) length += 1;
  const code = one.charCodeAt(length - 1);
  return code >= 0xd800 && code < 0xdc00 ? length - 1 : length;
}

function answerText(text, reference) {
  if (!text) return el('p', { class: 'empty' }, 'no text');
  const node = el('div', { class: 'answer', dir: 'auto' });
  if (reference === null || reference === text) {
    node.append(text);
  } else {
    const same = commonLength(text, reference);
    node.append(text.slice(0, same), el('mark', null, text.slice(same)));
  }
  return node;
}

function answerCard(name, text, reference, notes) {
  let verdict = null;
  if (reference !== null) verdict = reference === text ? ['same', 'same as whole KV'] : ['differs', 'differs from whole KV'];
  return el('article', { class: 'card' },
    el('h4', null, name, verdict ? [' ', el('span', { class: `chip ${verdict[0]}` }, verdict[1])] : null),
    answerText(text, reference),
    el('p', { class: 'note' }, notes.filter((note) => note).join(' · ')));
}

function answersOf(entry) {
  const cards = [];
  const seen = new Set();
  entry.rows.forEach((row, number) => {
    if (!row || !row.baseline) return;
    const { text, finish, ttft, tokens } = row.baseline;
    if (seen.has(text)) return;
    seen.add(text);
    const of = seen.size > 1 ? [' of ', badge(number)] : [];
    const notes = [tokens === null ? null : many(tokens, 'token'), finish && `ended by ${finish}`, ttft && `TTFT ${time(ttft)}`];
    cards.push(answerCard(el('span', null, 'Whole KV', ...of), text, null, notes));
  });
  entry.rows.forEach((row, number) => {
    const name = RUNS.length > 1 ? el('span', null, badge(number), ' ', RUNS[number].label) : 'Edited KV';
    if (!row) {
      cards.push(el('article', { class: 'card' }, el('h4', null, name), el('p', { class: 'empty' }, 'not in this run')));
      return;
    }
    const metrics = row.metrics || {};
    const notes = [
      metrics.output_tokens === undefined ? null : many(metrics.output_tokens, 'token'),
      row.finish && `ended by ${row.finish}`, metrics.ttft !== undefined && `TTFT ${time(metrics.ttft)}`,
    ];
    const card = answerCard(name, row.text, row.error || !row.baseline ? null : row.baseline.text, notes);
    if (row.error) card.querySelector('h4').after(errorBox(row.error));
    cards.push(card);
  });
  return el('div', { class: 'cards' }, cards);
}

function errorBox({ type, message, phase }) {
  const where = phase ? ` in ${phase}` : '';
  return el('div', { class: 'error' }, el('strong', null, `${type}${where}`), el('p', { dir: 'auto' }, message));
}

// The prompt as one line, its dropped parts empty.
function strip(row, number) {
  const total = row.pieces.reduce((sum, [length]) => sum + length, 0) || 1;
  let place = 0;
  let path = '';
  for (const [length, kept] of row.pieces) {
    if (kept) path += `M${((1000 * place) / total).toFixed(2)} 0h${((1000 * length) / total).toFixed(2)}v10h-${((1000 * length) / total).toFixed(2)}z`;
    place += length;
  }
  return svg('svg', { class: 'strip', viewBox: '0 0 1000 10', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
    svg('rect', { class: 'gone', width: 1000, height: 10 }), svg('path', { class: `bar run-${number % COLOURS}`, d: path }));
}

function promptText(row) {
  const text = DATA.texts[row.prompt];
  let place = 0;
  return row.pieces.map(([length, kept]) => {
    const piece = text.slice(place, place + length);
    place += length;
    return el(kept ? 'span' : 'del', kept ? { class: 'kept' } : null, piece);
  });
}

function promptOf(entry, onChange) {
  const known = entry.rows.map((row, number) => [row, number]).filter(([row]) => row && row.pieces);
  const heading = el('h3', null, 'Prompt');
  if (!known.length) {
    return el('section', null, heading, el('p', { class: 'empty' }, 'The text of this prompt is not in the file.'));
  }
  const box = el('div', { class: 'prompt', dir: 'auto', tabindex: 0, role: 'region', 'aria-label': 'Prompt: what was dropped is struck out' });
  const buttons = known.map(([row, number]) => {
    const kept = row.kv ? `${count(row.kv.tokens_after)} of ${many(row.kv.tokens_before, 'KV token')} kept, ${share(row.kv.tokens_after, row.kv.tokens_before)}` : 'nothing was dropped';
    const line = [strip(row, number), el('span', { class: 'note' }, badge(number), ' ', kept)];
    if (known.length === 1) return el('div', { class: 'choice' }, line);
    return el('button', { type: 'button', class: 'choice', 'aria-pressed': 'false', onclick: () => choose(number) }, line);
  });
  const choose = (number) => {
    box.replaceChildren(...promptText(entry.rows[number]));
    known.forEach(([, other], place) => {
      if (known.length > 1) buttons[place].setAttribute('aria-pressed', String(other === number));
    });
    onChange();
  };
  choose(known[0][1]);
  const only = el('input', { type: 'checkbox', onchange: () => box.classList.toggle('only', only.checked) });
  const key = el('p', { class: 'key' }, el('span', { class: 'kept' }, 'kept'), el('del', null, 'dropped'),
    el('label', null, only, ' hide what was dropped'));
  return el('section', null, heading, el('div', { class: 'choices' }, buttons), key, box);
}

const FIGURES = [
  ['Prompt tokens', (row) => count(row.prompt_tokens)],
  ['KV tokens, before', (row) => count(row.kv && row.kv.tokens_before)],
  ['KV tokens, after', (row) => count(row.kv && row.kv.tokens_after)],
  ['KV, before', (row) => (row.kv ? size(row.kv.bytes_before) : NONE)],
  ['KV, after', (row) => (row.kv ? size(row.kv.bytes_after) : NONE)],
  ['Recomputed tokens', (row) => count(row.kv && row.kv.recomputed_tokens)],
  ['Input tokens', (row) => count(row.metrics && row.metrics.input_tokens)],
  ['Of these cached', (row) => count(row.metrics && row.metrics.cached_tokens)],
  ['Output tokens', (row) => count(row.metrics && row.metrics.output_tokens)],
  ['TTFT', (row) => time(row.metrics && row.metrics.ttft)],
  ['TPOT', (row) => time(row.metrics && row.metrics.tpot)],
  ['ITL, mean', (row) => time(row.metrics && row.metrics.itl && row.metrics.itl[0])],
  ['ITL, p99', (row) => time(row.metrics && row.metrics.itl && row.metrics.itl[3])],
  ['E2E latency', (row) => time(row.metrics && row.metrics.e2e_latency)],
  ['Output tokens/s', (row) => (throughput(row) === null ? NONE : digits(throughput(row)))],
  ['TTFT of the prefill', (row) => time(row.metrics && row.metrics.prefill_ttft)],
  ['Edit', (row) => time(row.metrics && row.metrics.edit_time)],
  ['Waiting in the client', (row) => time(row.metrics && row.metrics.queue_time)],
  ['From turn to end', (row) => time(row.metrics && row.metrics.seconds)],
  ['Attempts, all phases', (row) => count(row.metrics && row.metrics.attempts)],
];

function figuresOf(entry) {
  const known = entry.rows.map((row, number) => [row, number]).filter(([row]) => row);
  const rows = FIGURES.map(([name, of]) => [name, known.map(([row]) => of(row))])
    .filter(([, values]) => values.some((value) => value !== NONE));
  const head = el('thead', null, el('tr', null, el('td'), known.map(([, number]) => el('th', { scope: 'col' }, badge(number)))));
  const table = el('table', { class: 'figures' }, RUNS.length > 1 ? head : null,
    el('tbody', null, rows.map(([name, values]) => el('tr', null, el('th', { scope: 'row' }, name), values.map((value) => el('td', null, value))))));
  return el('section', null, el('h3', null, 'Figures'), RUNS.length > 2 ? scrolling('Figures', table) : table);
}

function extrasOf(entry) {
  const row = entry.rows.find((each) => each && each.extra);
  if (!row) return null;
  const pairs = row.extra.flatMap(([name, value]) => [el('dt', null, name), el('dd', { dir: 'auto' }, value)]);
  return el('section', null, el('h3', null, 'From the prompts’ file'), el('dl', { class: 'extra' }, pairs));
}

function detailOf(entry, onChange) {
  return el('div', { class: 'detail' },
    el('section', null, el('h3', null, 'Answers'), answersOf(entry)),
    el('div', { class: RUNS.length > 1 ? 'beside many' : 'beside' }, promptOf(entry, onChange), el('div', null, figuresOf(entry), extrasOf(entry))));
}

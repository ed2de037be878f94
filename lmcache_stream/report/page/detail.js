const FIGURES = [
  ['Prompt tokens', (row) => count(row.prompt_tokens)],
  ['KV tokens, before', (row) => count(row.kv && row.kv.tokens_before)],
  ['KV tokens, after', (row) => count(row.kv && row.kv.tokens_after)],
  ['KV, before', (row) => (row.kv ? size(row.kv.bytes_before) : NONE)],
  ['KV, after', (row) => (row.kv ? size(row.kv.bytes_after) : NONE)],
  ['Recomputed tokens', (row) => count(row.kv && row.kv.recomputed_tokens)],
  ['Input tokens', ({ metrics }) => count(metrics && metrics.input_tokens)],
  ['Of these cached', ({ metrics }) => count(metrics && metrics.cached_tokens)],
  ['Output tokens', ({ metrics }) => count(metrics && metrics.output_tokens)],
  ['TTFT', ({ metrics }) => time(metrics && metrics.ttft)],
  ['TPOT', ({ metrics }) => time(metrics && metrics.tpot)],
  ['ITL, mean', ({ metrics }) => time(metrics && metrics.itl && metrics.itl[0])],
  ['ITL, p99', ({ metrics }) => time(metrics && metrics.itl && metrics.itl[3])],
  ['E2E latency', ({ metrics }) => time(metrics && metrics.e2e_latency)],
  ['Output tokens/s', (row) => (throughput(row) === null ? NONE : digits(throughput(row)))],
  ['TTFT of the prefill', ({ metrics }) => time(metrics && metrics.prefill_ttft)],
  ['Edit', ({ metrics }) => time(metrics && metrics.edit_time)],
  ['Waiting in the client', ({ metrics }) => time(metrics && metrics.queue_time)],
  ['From turn to end', ({ metrics }) => time(metrics && metrics.seconds)],
  ['Attempts, all phases', ({ metrics }) => count(metrics && metrics.attempts)],
];

function figuresOf(entry) {
  const known = entry.rows.map((row, number) => [row, number]).filter(([row]) => row);
  const rows = FIGURES.map(([name, of]) => [name, known.map(([row]) => of(row))])
    .filter(([, values]) => values.some((value) => value !== NONE));
  const columns = known.map(([, number]) => el('th', { scope: 'col' }, badge(number)));
  const head = el('thead', null, el('tr', null, el('td'), columns));
  const line = ([name, values]) =>
    el('tr', null, el('th', { scope: 'row' }, name), values.map((value) => el('td', null, value)));
  const table = el('table', { class: 'figures' }, RUNS.length > 1 ? head : null,
    el('tbody', null, rows.map(line)));
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
    el('div', { class: RUNS.length > 1 ? 'beside many' : 'beside' },
      promptOf(entry, onChange), el('div', null, figuresOf(entry), extrasOf(entry))));
}

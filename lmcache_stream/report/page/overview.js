function fileLine(file) {
  const when = new Date(1e3 * file.modified);
  const shown = when.toLocaleString('en-GB', { dateStyle: 'medium', timeStyle: 'short' });
  const written = el('time', { datetime: when.toISOString() }, shown);
  return el('li', null, el('code', null, file.name), `, ${many(file.rows, 'row')}, last written `, written);
}

function showHead(section) {
  const [first] = RUNS;
  const models = [...new Set(RUNS.map((run) => run.model).filter((model) => model))];
  const title = RUNS.length === 1 ? first.label : `${count(RUNS.length)} runs, ${many(DATA.entries.length, 'row')}`;
  section.append(
    el('p', { class: 'eyebrow' }, 'Token dropping', models.length ? ` on ${models.join(', ')}` : ''),
    el('h1', null, title),
    el('ul', { class: 'sources' }, DATA.files.map(fileLine)),
  );
  for (const file of DATA.files.filter((each) => each.broken)) {
    const lines = file.broken_lines.map(({ line, reason }) => el('li', null, `line ${line}: ${reason}`));
    if (file.broken > lines.length) lines.push(el('li', null, `and ${count(file.broken - lines.length)} more`));
    const are = file.broken === 1 ? 'is' : 'are';
    const told = `${many(file.broken, 'line')} of ${file.name} could not be read and ${are} missing here.`;
    section.append(el('details', { class: 'notice' }, el('summary', null, told), el('ul', null, lines)));
  }
  const replaced = RUNS.reduce((sum, run) => sum + run.replaced, 0);
  if (replaced) {
    const told = `${many(replaced, 'row')} had a later row with the same id, which took its place.`;
    section.append(el('p', { class: 'notice' }, told));
  }
}

function tile(name, value, note, filter) {
  const node = el('div', { class: 'tile' }, el('dt', null, name), el('dd', null, value));
  if (note) node.append(el('dd', { class: 'note' }, note));
  if (filter) {
    const show = el('button', { type: 'button', class: 'link', onclick: () => LIST.show(filter) }, 'show them');
    node.append(el('dd', { class: 'note' }, show));
  }
  return node;
}

const failuresOf = (run) =>
  Object.entries(run.failures).map(([type, number]) => `${count(number)} ${type}`).join(', ');

function tiles(run) {
  const found = [
    tile('Rows', count(run.rows), `${count(run.rows - run.failed)} came to their end`),
    tile('Failed', count(run.failed), failuresOf(run), run.failed ? 'failed' : null),
    tile('Retried', count(run.retried), many(run.retries, 'further attempt')),
  ];
  if (run.compared) {
    const note = `${count(run.same)} of ${count(run.compared)} as from the whole KV`;
    found.push(tile('Same answer', share(run.same, run.compared), note, run.same < run.compared ? 'differs' : null));
  }
  if (run.tokens_before) {
    const note = `${count(run.tokens_after)} of ${count(run.tokens_before)} tokens`;
    found.push(tile('KV kept', share(run.tokens_after, run.tokens_before), note));
  }
  if (run.bytes_before) {
    found.push(tile('KV in bytes', size(run.bytes_after), `of ${size(run.bytes_before)}`));
  }
  found.push(tile('Prompt tokens', count(run.prompt_tokens), 'of rows that came to their end'));
  const recomputed = run.recomputed_tokens ? `${many(run.recomputed_tokens, 'KV token')} recomputed` : null;
  found.push(tile('Output tokens', count(run.output_tokens), recomputed));
  return el('dl', { class: 'tiles' }, found);
}

function runsTable() {
  const head = ['Run', 'Rows', 'Failed', 'Retried', 'Same answer', 'KV kept', 'KV after', 'Output tokens'];
  const row = (run, number) =>
    el('tr', null,
      el('th', { scope: 'row' }, badge(number), ' ', run.label),
      el('td', null, count(run.rows)),
      el('td', { title: failuresOf(run) }, count(run.failed)),
      el('td', null, count(run.retried)),
      el('td', null, share(run.same, run.compared)),
      el('td', null, share(run.tokens_after, run.tokens_before)),
      el('td', null, run.bytes_before ? size(run.bytes_after) : NONE),
      el('td', null, count(run.output_tokens)));
  const table = el('table', { class: 'figures runs' },
    el('thead', null, el('tr', null, head.map((text) => el('th', { scope: 'col' }, text)))),
    el('tbody', null, RUNS.map(row)));
  return scrolling('Runs', table);
}

function showOverview(section) {
  section.append(RUNS.length === 1 ? tiles(RUNS[0]) : runsTable());
}

const SLICE = 100;

const present = (entry, run) => (run === null ? entry.rows : [entry.rows[run]]).filter((row) => row);

const FILTERS = [
  { key: 'all', name: 'All', takes: () => true },
  { key: 'failed', name: 'Failed', takes: (row) => Boolean(row.error) },
  { key: 'differs', name: 'Differs from whole KV', takes: (row) => row.same === false },
  { key: 'retried', name: 'Retried', takes: (row) => row.retries > 0 },
  {
    key: 'runs', name: 'Runs differ',
    takesEntry: (entry) => new Set(entry.rows.filter((row) => row && !row.error).map((row) => row.text)).size > 1,
  },
];

const COLUMNS = [
  { key: 'prompt', name: 'Prompt', unit: 'tokens', of: (row) => row.prompt_tokens, show: count },
  { key: 'kept', name: 'KV kept', of: (row) => (row.kv && row.kv.tokens_before ? row.kv.tokens_after / row.kv.tokens_before : null), show: (value) => share(value, 1) },
  { key: 'ttft', name: 'TTFT', of: (row) => row.metrics && row.metrics.ttft, show: time },
  { key: 'e2e', name: 'E2E', of: (row) => row.metrics && row.metrics.e2e_latency, show: time },
  { key: 'speed', name: 'Tokens/s', of: throughput, show: digits },
];

const collator = new Intl.Collator('en', { numeric: true });
const ORDERS = [
  { key: 'line', name: 'Order of the prompts', of: (entry) => entry.line },
  { key: 'id', name: 'Id', of: (entry) => entry.id },
  { key: 'end', name: 'Completion', of: (entry, row) => row.order },
  ...COLUMNS.map((column) => ({ ...column, of: (entry, row) => column.of(row) })),
];

function sortedBy(entries, key, isReversed, run) {
  const order = ORDERS.find((each) => each.key === key);
  const keyed = entries.map((entry) => {
    const values = present(entry, run).map((row) => order.of(entry, row));
    return [values.find((value) => value !== null && value !== undefined), entry];
  });
  const sign = isReversed ? -1 : 1;
  keyed.sort(([one], [other]) => {
    // What has no value stands last in either direction.
    if (one === undefined || other === undefined) return (one === undefined) - (other === undefined);
    return sign * (typeof one === 'string' ? collator.compare(one, other) : one - other);
  });
  return keyed.map(([, entry]) => entry);
}

function textOf(entry) {
  if (entry.searched === undefined) {
    const parts = [entry.id];
    const prompts = new Set();
    for (const row of present(entry, null)) {
      parts.push(row.text);
      if (row.baseline) parts.push(row.baseline.text);
      if (row.error) parts.push(row.error.type, row.error.message);
      if (row.prompt !== undefined) prompts.add(row.prompt);
    }
    for (const prompt of prompts) parts.push(DATA.texts[prompt]);
    entry.searched = parts.join('\n').toLowerCase();
  }
  return entry.searched;
}

function chips(row) {
  const found = [];
  if (row.error) found.push(el('span', { class: 'chip failed' }, 'failed'));
  if (row.same === false) found.push(el('span', { class: 'chip differs' }, 'differs'));
  if (row.same === true) found.push(el('span', { class: 'chip same' }, 'same'));
  if (row.retries) found.push(el('span', { class: 'chip' }, `${row.retries} retr${row.retries === 1 ? 'y' : 'ies'}`));
  return found;
}

function lineOf(row, number) {
  const said = (row.error ? `${row.error.type}: ${row.error.message}` : row.text).slice(0, 240).trim();
  const text = said.replace(/\s+/g, ' ') || 'no text';
  return el('div', { class: 'line' },
    el('span', { class: 'said' }, badge(number), chips(row), el('span', { class: row.error ? 'reason' : 'text', dir: 'auto' }, text)),
    COLUMNS.map((column) => {
      const value = column.of(row);
      const shown = value === null || value === undefined ? NONE : column.show(value);
      return el('span', { class: 'number' }, el('span', { class: 'what' }, `${column.name} `), shown);
    }));
}

function itemOf(entry, run, onChange) {
  const lines = entry.rows.map((row, number) => (row && (run === null || run === number) ? lineOf(row, number) : null));
  const summary = el('summary', null, el('span', { class: 'id' }, entry.id), el('div', { class: 'lines' }, lines));
  const details = el('details', null, summary);
  // What is inside is made when it is looked at: a prompt can be thousands of pieces.
  details.addEventListener('toggle', () => {
    if (details.open && details.children.length === 1) details.append(detailOf(entry, onChange));
    onChange();
  });
  return el('li', null, details);
}

const control = (name, input, kind) =>
  el('div', { class: `control ${kind || ''}` }, el('label', { for: input.id }, name), input);

function makeList(section) {
  const state = { filter: 'all', search: '', run: null, order: 'line', isReversed: false };
  let shown = [];
  const items = el('ol', { class: 'items' });
  const status = el('p', { class: 'status', role: 'status' });
  const more = el('button', { type: 'button', class: 'more', onclick: () => append(true) });

  function append(isAsked) {
    const from = items.children.length;
    items.append(...shown.slice(from, from + SLICE).map((entry) => itemOf(entry, state.run, markFound)));
    const left = shown.length - items.children.length;
    more.hidden = left === 0;
    more.textContent = `Show ${Math.min(SLICE, left)} more of ${count(left)}`;
    if (isAsked) items.children[from].querySelector('summary').focus();
  }

  const markFound = () => highlight(items, state.search.trim().toLowerCase());

  const takes = (filter, entry) =>
    filter.takesEntry ? filter.takesEntry(entry) : present(entry, state.run).some(filter.takes);

  function refresh() {
    const filter = FILTERS.find((each) => each.key === state.filter);
    const search = state.search.trim().toLowerCase();
    const found = DATA.entries.filter((entry) =>
      present(entry, state.run).length && takes(filter, entry) && (!search || textOf(entry).includes(search)));
    shown = sortedBy(found, state.order, state.isReversed, state.run);
    items.replaceChildren();
    append(false);
    markFound();
    status.textContent = shown.length ? `${count(shown.length)} of ${many(DATA.entries.length, 'row')}` : 'No row is like this.';
    for (const button of section.querySelectorAll('[data-order]')) {
      const isIt = button.dataset.order === state.order;
      button.setAttribute('aria-pressed', String(isIt));
      button.dataset.direction = isIt ? (state.isReversed ? 'down' : 'up') : '';
    }
    select.value = state.order;
    direction.textContent = state.isReversed ? '↓ descending' : '↑ ascending';
    for (const input of filters.querySelectorAll('input')) input.checked = input.value === state.filter;
  }

  function change(values) {
    Object.assign(state, values);
    refresh();
  }

  const offered = FILTERS.filter((filter) => filter.key === 'all' || (filter.key === 'runs' && RUNS.length > 1)
    || DATA.entries.some((entry) => takes(filter, entry)));
  const filters = el('fieldset', { class: 'filters' }, el('legend', { class: 'hidden' }, 'Which rows'),
    offered.map((filter) => el('label', null,
      el('input', { type: 'radio', name: 'filter', value: filter.key, onchange: () => change({ filter: filter.key }) }),
      el('span', null, filter.name, ' ', el('span', { class: 'count' }, count(DATA.entries.filter((entry) => takes(filter, entry)).length))))));

  let typing = 0;
  const search = el('input', {
    type: 'search', id: 'search', placeholder: 'Id, answer, prompt, error', autocomplete: 'off', spellcheck: 'false',
    oninput: () => {
      clearTimeout(typing);
      typing = setTimeout(() => change({ search: search.value }), 120);
    },
  });
  const runs = RUNS.length > 1 ? control('Run', el('select', { id: 'run', onchange: (event) => change({ run: event.target.value === '' ? null : Number(event.target.value) }) },
      el('option', { value: '' }, 'all'),
      RUNS.map((run, number) => el('option', { value: number }, `${LETTERS[number]}: ${run.label}`)))) : null;
  const select = el('select', { id: 'order', onchange: () => change({ order: select.value }) },
    ORDERS.map((order) => el('option', { value: order.key }, order.name)));
  const direction = el('button', { type: 'button', class: 'direction', onclick: () => change({ isReversed: !state.isReversed }) });

  const sorter = (key, name) => el('button', {
    type: 'button', 'data-order': key,
    onclick: () => change({ order: key, isReversed: state.order === key && !state.isReversed }),
  }, name);
  const head = el('div', { class: 'list-head', role: 'group', 'aria-label': 'Sort by' }, sorter('id', 'Id'),
    el('div', { class: 'line' }, el('span', null, 'Answer'), COLUMNS.map((column) => sorter(column.key, column.name))));

  section.append(
    el('h2', { id: 'rows-title' }, 'Rows'),
    el('div', { class: 'controls' },
      control('Search', search, 'wide'), runs, control('Sort by', select), direction),
    filters, status, head, items, more);

  // From one row to the next without going through what is open.
  items.addEventListener('keydown', (event) => {
    const summary = event.target.closest('summary');
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!summary || !step || summary.parentElement.parentElement.parentElement !== items) return;
    const item = summary.closest('ol.items > li');
    const next = step > 0 ? item.nextElementSibling : item.previousElementSibling;
    if (next) next.querySelector('summary').focus();
    event.preventDefault();
  });
  document.addEventListener('keydown', (event) => {
    const isTyping = event.target.closest('input, select, textarea');
    if (event.key !== '/' || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    search.focus();
  });
  refresh();
  return {
    show: (filter) => {
      change({ filter });
      section.scrollIntoView();
      section.focus({ preventScroll: true });
    },
  };
}

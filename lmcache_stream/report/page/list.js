const SLICE = 100;

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

  const takes = (filter, entry) => {
    const rows = present(entry, state.run);
    return rows.length > 0 && (filter.takesEntry ? filter.takesEntry(entry) : rows.some(filter.takes));
  };

  const numberOf = (key) => {
    const filter = FILTERS.find((each) => each.key === key);
    return DATA.entries.filter((entry) => takes(filter, entry)).length;
  };

  function refresh() {
    const filter = FILTERS.find((each) => each.key === state.filter);
    const search = state.search.trim().toLowerCase();
    const found = DATA.entries.filter((entry) =>
      takes(filter, entry) && (!search || textOf(entry).includes(search)));
    shown = sortedBy(found, state.order, state.isReversed, state.run);
    items.replaceChildren();
    append(false);
    markFound();
    const told = `${count(shown.length)} of ${many(DATA.entries.length, 'row')}`;
    status.textContent = shown.length ? told : 'No row is like this.';
    for (const button of section.querySelectorAll('[data-order]')) {
      const isIt = button.dataset.order === state.order;
      button.setAttribute('aria-pressed', String(isIt));
      button.dataset.direction = isIt ? (state.isReversed ? 'down' : 'up') : '';
    }
    select.value = state.order;
    direction.textContent = state.isReversed ? '↓ descending' : '↑ ascending';
    for (const input of filters.querySelectorAll('input')) {
      input.checked = input.value === state.filter;
      input.parentElement.querySelector('.count').textContent = count(numberOf(input.value));
    }
  }

  function change(values) {
    Object.assign(state, values);
    refresh();
  }

  const isOffered = (filter) =>
    filter.key === 'all'
    || (filter.key === 'runs' && RUNS.length > 1)
    || DATA.entries.some((entry) => takes(filter, entry));
  const offered = FILTERS.filter(isOffered);
  const filterOf = ({ key, name }) =>
    el('label', null,
      el('input', { type: 'radio', name: 'filter', value: key, onchange: () => change({ filter: key }) }),
      el('span', null, name, ' ', el('span', { class: 'count' })));
  const filters = el('fieldset', { class: 'filters' },
    el('legend', { class: 'hidden' }, 'Which rows'),
    offered.map(filterOf));

  let typing = 0;
  const search = el('input', {
    type: 'search', id: 'search', placeholder: 'Id, answer, prompt, error', autocomplete: 'off', spellcheck: 'false',
    oninput: () => {
      clearTimeout(typing);
      typing = setTimeout(() => change({ search: search.value }), 120);
    },
  });
  const choose = () => change({ run: choice.value === '' ? null : Number(choice.value) });
  const choice = el('select', { id: 'run', onchange: choose },
    el('option', { value: '' }, 'all'),
    RUNS.map((run, number) => el('option', { value: number }, `${LETTERS[number]}: ${run.label}`)));
  const select = el('select', { id: 'order', onchange: () => change({ order: select.value }) },
    ORDERS.map((order) => el('option', { value: order.key }, order.name)));
  const reverse = () => change({ isReversed: !state.isReversed });
  const direction = el('button', { type: 'button', class: 'direction', onclick: reverse });

  const sorter = (key, name) => el('button', {
    type: 'button', 'data-order': key,
    onclick: () => change({ order: key, isReversed: state.order === key && !state.isReversed }),
  }, name);
  const head = el('div', { class: 'list-head', role: 'group', 'aria-label': 'Sort by' }, sorter('id', 'Id'),
    el('div', { class: 'line' }, el('span', null, 'Answer'), COLUMNS.map((column) => sorter(column.key, column.name))));

  section.append(
    el('h2', { id: 'rows-title' }, 'Rows'),
    el('div', { class: 'controls' },
      control('Search', search, 'wide'),
      RUNS.length > 1 ? control('Run', choice) : null,
      control('Sort by', select),
      direction),
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
      search.value = choice.value = '';
      change({ filter, search: '', run: null });
      section.scrollIntoView();
      section.focus({ preventScroll: true });
    },
  };
}

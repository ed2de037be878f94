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
    el('span', { class: 'said' },
      badge(number), chips(row), el('span', { class: row.error ? 'reason' : 'text', dir: 'auto' }, text)),
    COLUMNS.map((column) => {
      const value = column.of(row);
      const shown = value === null || value === undefined ? NONE : column.show(value);
      return el('span', { class: 'number' }, el('span', { class: 'what' }, `${column.name} `), shown);
    }));
}

function itemOf(entry, run, onChange) {
  const isShown = (row, number) => row && (run === null || run === number);
  const lines = entry.rows.map((row, number) => (isShown(row, number) ? lineOf(row, number) : null));
  const summary = el('summary', null, el('span', { class: 'id' }, entry.id), el('div', { class: 'lines' }, lines));
  const details = el('details', null, summary);
  // What is inside is made when it is looked at: a prompt can be thousands of pieces.
  details.addEventListener('toggle', () => {
    if (details.open && details.children.length === 1) details.append(detailOf(entry, onChange));
    onChange();
  });
  return el('li', null, details);
}

// The prompt as one line, its dropped parts empty.
function strip(row, number) {
  const total = row.pieces.reduce((sum, [length]) => sum + length, 0) || 1;
  const scale = (length) => ((1000 * length) / total).toFixed(2);
  let place = 0;
  let path = '';
  for (const [length, isKept] of row.pieces) {
    if (isKept) path += `M${scale(place)} 0h${scale(length)}v10h-${scale(length)}z`;
    place += length;
  }
  const box = { viewBox: '0 0 1000 10', preserveAspectRatio: 'none', 'aria-hidden': 'true' };
  return svg('svg', { class: 'strip', ...box },
    svg('rect', { class: 'gone', width: 1000, height: 10 }),
    svg('path', { class: `bar ${colourOf(number)}`, d: path }));
}

function promptText(row) {
  const text = DATA.texts[row.prompt];
  let place = 0;
  return row.pieces.map(([length, isKept]) => {
    const piece = text.slice(place, place + length);
    place += length;
    return isKept ? el('span', { class: 'kept' }, piece) : el('del', null, piece);
  });
}

function keptNote(row) {
  if (!row.kv) return 'nothing was dropped';
  const { tokens_after: after, tokens_before: before } = row.kv;
  return `${count(after)} of ${many(before, 'KV token')} kept, ${share(after, before)}`;
}

// A strip a run, and the text with what the chosen run dropped.
function promptOf(entry, onChange) {
  const known = entry.rows.map((row, number) => [row, number]).filter(([row]) => row && row.pieces);
  const heading = el('h3', null, 'Prompt');
  if (!known.length) {
    return el('section', null, heading, el('p', { class: 'empty' }, 'The text of this prompt is not in the file.'));
  }
  const name = 'Prompt, struck out what was dropped';
  const box = el('div', { class: 'prompt', dir: 'auto', tabindex: 0, role: 'region', 'aria-label': name });
  const choices = known.map(([row, number]) => {
    const line = [strip(row, number), el('span', { class: 'note' }, badge(number), ' ', keptNote(row))];
    if (known.length === 1) return el('div', { class: 'choice' }, line);
    return el('button', { type: 'button', class: 'choice', onclick: () => choose(number) }, line);
  });
  const choose = (chosen) => {
    box.replaceChildren(...promptText(entry.rows[chosen]));
    known.forEach(([, number], place) => {
      if (known.length > 1) choices[place].setAttribute('aria-pressed', String(number === chosen));
    });
    onChange();
  };
  choose(known[0][1]);
  const only = el('input', { type: 'checkbox', onchange: () => box.classList.toggle('only', only.checked) });
  const key = el('p', { class: 'key' },
    el('span', { class: 'kept' }, 'kept'), el('del', null, 'dropped'), el('label', null, only, ' hide what was dropped'));
  return el('section', null, heading, el('div', { class: 'choices' }, choices), key, box);
}

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
  if (reference !== null) {
    verdict = reference === text ? ['same', 'same as whole KV'] : ['differs', 'differs from whole KV'];
  }
  return el('article', { class: 'card' },
    el('h4', null, name, ...(verdict ? [' ', el('span', { class: `chip ${verdict[0]}` }, verdict[1])] : [])),
    answerText(text, reference),
    el('p', { class: 'note' }, notes.filter((note) => note).join(' · ')));
}

function notesOf(tokens, finish, ttft) {
  const isKnown = (value) => value !== null && value !== undefined;
  return [
    isKnown(tokens) && many(tokens, 'token'),
    finish && `ended by ${finish}`,
    isKnown(ttft) && `TTFT ${time(ttft)}`,
  ];
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
    cards.push(answerCard(el('span', null, 'Whole KV', ...of), text, null, notesOf(tokens, finish, ttft)));
  });
  entry.rows.forEach((row, number) => {
    const alone = RUNS[number].policy === null ? 'Answer' : 'Edited KV';
    const name = RUNS.length > 1 ? el('span', null, badge(number), ' ', RUNS[number].label) : alone;
    if (!row) {
      const none = el('p', { class: 'empty' }, 'not in this run');
      cards.push(el('article', { class: 'card' }, el('h4', null, name), none));
      return;
    }
    const metrics = row.metrics || {};
    const notes = notesOf(metrics.output_tokens, row.finish, metrics.ttft);
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

// Text gets into the page as text alone: through `append` and `textContent`, never as markup.

const SVG = 'http://www.w3.org/2000/svg';

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  return node;
}

function el(tag, attributes, ...children) {
  const node = set(document.createElement(tag), attributes);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes, ...children) {
  const node = set(document.createElementNS(SVG, tag), attributes);
  node.append(...children);
  return node;
}

const hidden = (text) => el('span', { class: 'hidden' }, text);

// The baselines of all runs are a series that belongs to none.
const colourOf = (run) => (run === null ? 'baseline' : `run-${run % COLOURS}`);

// Which run something is of: a letter and a colour, and for a screen reader its name.
function badge(run) {
  if (RUNS.length === 1) return null;
  const { label } = RUNS[run];
  return el('span', { class: `badge ${colourOf(run)}`, title: label }, LETTERS[run], hidden(` (${label})`));
}

// What is wider than the page scrolls in itself, also by keyboard.
const scrolling = (label, ...children) =>
  el('div', { class: 'scrolling', tabindex: 0, role: 'region', 'aria-label': label }, ...children);

// Marks what was searched for, without a change to the elements; an older browser marks nothing.

const MOST_RANGES = 500; // of one box

function highlight(root, search) {
  if (!window.Highlight || !CSS.highlights) return;
  CSS.highlights.delete('found');
  if (!search) return;
  const ranges = [];
  for (const box of root.querySelectorAll('.id, .text, .reason, .answer, .error, .prompt')) {
    ranges.push(...rangesIn(box, search));
  }
  CSS.highlights.set('found', new Highlight(...ranges));
}

// What is found may begin in a kept part of a prompt and end in a dropped one.
function rangesIn(box, search) {
  const text = box.textContent.toLowerCase();
  if (text.length !== box.textContent.length) return []; // places in the one are not those in the other
  const nodes = [];
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  for (let start = 0; walker.nextNode(); start += walker.currentNode.length) {
    nodes.push({ node: walker.currentNode, start, end: start + walker.currentNode.length });
  }
  const ranges = [];
  let first = 0;
  const next = (from) => text.indexOf(search, from);
  for (let at = next(0); at >= 0 && ranges.length < MOST_RANGES; at = next(at + search.length)) {
    while (nodes[first].end <= at) first += 1;
    let last = first;
    while (nodes[last].end < at + search.length) last += 1;
    const range = new Range();
    range.setStart(nodes[first].node, at - nodes[first].start);
    range.setEnd(nodes[last].node, at + search.length - nodes[last].start);
    ranges.push(range);
  }
  return ranges;
}

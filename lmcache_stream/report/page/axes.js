const MARGIN = { left: 46, right: 14, bottom: 38 };
const LETTER = 6.6; // of the charts' text, in pixels

function textAt(x, y, text, attributes) {
  return svg('text', { x, y, ...attributes }, text);
}

function frame(width, height, label) {
  return svg('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': label });
}

function xAxis(root, { low, high, scale, x, width, y, title }) {
  const most = Math.max(2, Math.floor((width - MARGIN.left - MARGIN.right) / 50));
  for (const tick of ticks(low * scale.factor, high * scale.factor, most)) {
    const place = x(tick.value / scale.factor);
    root.append(
      svg('line', { class: 'axis', x1: place, x2: place, y1: y, y2: y + 4 }),
      textAt(place, y + 16, tick.text, { class: 'tick', 'text-anchor': 'middle' }),
    );
  }
  const middle = MARGIN.left + (width - MARGIN.left - MARGIN.right) / 2;
  root.append(textAt(middle, y + 32, title, { class: 'unit', 'text-anchor': 'middle' }));
}

const linear = (low, high, from, to) => (value) => from + ((value - low) / (high - low)) * (to - from);

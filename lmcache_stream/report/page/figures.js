const NONE = '–';

const whole = new Intl.NumberFormat('en');
const count = (value) => (value === null || value === undefined ? NONE : whole.format(value));
const share = (part, of) => (of ? `${((100 * part) / of).toFixed(1)} %` : NONE);
const many = (value, one, more) => `${count(value)} ${value === 1 ? one : more || one + 's'}`;

// Three significant digits, but never an exponent.
function digits(value) {
  if (value === 0) return '0';
  const places = Math.max(0, Math.min(4, 2 - Math.floor(Math.log10(Math.abs(value)))));
  return value.toLocaleString('en', { minimumFractionDigits: places, maximumFractionDigits: places });
}

function time(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0.9995) return `${digits(1e3 * seconds)} ms`;
  return seconds < 600 ? `${digits(seconds)} s` : `${digits(seconds / 60)} min`;
}

const POWERS = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];

function scaleOfBytes(bytes) {
  const power = bytes > 0 ? Math.min(POWERS.length - 1, Math.floor(Math.log2(bytes) / 10)) : 0;
  return { unit: POWERS[power], factor: 1024 ** -power };
}

function size(bytes) {
  const { unit, factor } = scaleOfBytes(bytes);
  return `${unit === 'B' ? count(bytes) : digits(bytes * factor)} ${unit}`;
}

// What a chart's values are shown in.
function scaleOf(unit, highest) {
  if (unit !== 's') return { unit, factor: 1 };
  if (highest < 1) return { unit: 'ms', factor: 1e3 };
  return highest < 600 ? { unit: 's', factor: 1 } : { unit: 'min', factor: 1 / 60 };
}

// Round values from low to high, at most so many.
function ticks(low, high, most) {
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough * (1 - 1e-9));
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high * (1 + 1e-9); place += 1) {
    found.push(place * step || 0); // not -0
  }
  const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const text = (value) =>
    value.toLocaleString('en', { minimumFractionDigits: places, maximumFractionDigits: places });
  return found.map((value) => ({ value, text: text(value) }));
}

// A row's output tokens by its end-to-end latency.
function throughput(row) {
  const metrics = row.metrics || {};
  return metrics.output_tokens && metrics.e2e_latency ? metrics.output_tokens / metrics.e2e_latency : null;
}

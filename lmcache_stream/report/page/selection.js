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
  { key: 'prompt', name: 'Prompt', of: (row) => row.prompt_tokens, show: count },
  {
    key: 'kept', name: 'KV kept', show: (value) => share(value, 1),
    of: ({ kv }) => (kv && kv.tokens_before ? kv.tokens_after / kv.tokens_before : null),
  },
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

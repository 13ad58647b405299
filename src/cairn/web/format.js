// Numbers, sizes and times as people read them.

const whole = new Intl.NumberFormat("en");

export const count = (n) => whole.format(Math.round(n ?? 0));

/** Format a count: "1 turn", "2 turns". */
export const several = (n, name) => `${count(n)} ${name}${n === 1 ? "" : "s"}`;

/** Abbreviate a number for narrow columns: 1,234 is 1.2k. */
export function short(n) {
  for (const [size, name] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (n >= size) return (n / size).toFixed(n < 10 * size ? 1 : 0) + name;
  }
  return String(Math.round(n ?? 0));
}

export function bytes(n) {
  for (const [size, name] of [
    [2 ** 40, "TiB"],
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
  ]) {
    if (n >= size) return (n / size).toFixed(n < 10 * size ? 1 : 0) + " " + name;
  }
  return `${n ?? 0} bytes`;
}

export function seconds(s) {
  if (s < 0.0995) return `${Math.round(1000 * s)} ms`;
  if (s < 60) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} days`;
}

/** Format how long ago a time was, given in seconds since 1970. */
export function ago(at, now = Date.now() / 1000) {
  const passed = Math.max(0, now - at);
  if (passed < 5) return "now";
  if (passed < 60) return `${Math.floor(passed)} s ago`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 86400) return `${Math.floor(passed / 3600)} h ago`;
  return `${Math.floor(passed / 86400)} d ago`;
}

export const percent = (part) => `${Math.round(100 * part)} %`;

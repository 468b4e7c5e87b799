// Numbers and names as people read them.

const whole = new Intl.NumberFormat("en");

export const count = (n) => (n === null || n === undefined ? "–" : whole.format(Math.round(n)));

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

export function real(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (x !== 0 && (Math.abs(x) >= 1e6 || Math.abs(x) < 1e-3)) return minus(x.toExponential(2));
  return minus(String(Number(x.toFixed(digits))));
}

export function fixed(x, digits = 2) {
  return x === null || x === undefined ? "–" : minus(x.toFixed(digits));
}

export function signed(x) {
  return x > 0 ? `+${real(x)}` : real(x);
}

const minus = (text) => text.replace(/^-/, "−");

export function bytes(n) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (n < 1000) return `${unit === "B" ? n : n.toPrecision(3)} ${unit}`;
    n /= 1000;
  }
  return `${n.toPrecision(3)} TB`;
}

export function percent(p) {
  if (p >= 0.1) return `${(100 * p).toFixed(1)}%`;
  return `${(100 * p).toPrecision(2)}%`;
}

// Text with its blanks visible, as one line.
export function quoted(text) {
  return JSON.stringify(text);
}

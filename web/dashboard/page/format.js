// Human-readable formats of numbers.

export const NONE = "–";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const SHORT = ["", "k", "M", "G", "T"];

const isKnown = (value) => value !== null && value !== undefined && Number.isFinite(value);

function threeDigits(value) {
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function scaled(value, base, names) {
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= base * 0.9995 && unit < names.length - 1) {
    size /= base;
    unit += 1;
  }
  return [threeDigits(size), names[unit]];
}

export function bytes(value) {
  return isKnown(value) ? scaled(value, 1024, UNITS).join(" ") : NONE;
}

export function count(value) {
  return isKnown(value) ? Math.round(value).toLocaleString("en-US") : NONE;
}

export function short(value) {
  return isKnown(value) ? scaled(value, 1000, SHORT).join("") : NONE;
}

export function percent(value) {
  if (!isKnown(value)) return NONE;
  const hundredths = value * 100;
  if (hundredths > 0 && hundredths < 0.05) return "< 0.1 %";
  return `${hundredths === 0 || Math.abs(hundredths) >= 10 ? hundredths.toFixed(0) : hundredths.toFixed(1)} %`;
}

export function seconds(value) {
  if (!isKnown(value)) return NONE;
  if (value === 0) return "0 s";
  if (value < 0.001) return `${threeDigits(value * 1e6)} µs`;
  if (value < 1) return `${threeDigits(value * 1000)} ms`;
  if (value < 120) return `${threeDigits(value)} s`;
  if (value < 7200) return `${threeDigits(value / 60)} min`;
  if (value < 2 * 86400) return `${threeDigits(value / 3600)} h`;
  return `${threeDigits(value / 86400)} d`;
}

const DURATIONS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"]];

// A duration that is a tick of an axis: a round number of the largest unit that fits.
export function secondsTick(value) {
  if (!isKnown(value) || value === 0) return value === 0 ? "0" : "";
  const [size, unit] = DURATIONS.find(([each]) => value >= each * 0.9999) ?? DURATIONS.at(-1);
  return `${Number((value / size).toPrecision(3))} ${unit}`;
}

// A difference of two percentages.
export function points(difference) {
  const shown = Math.round(difference * 100);
  return `${shown} percentage ${shown === 1 ? "point" : "points"}`;
}

export function years(value) {
  if (!isKnown(value)) return NONE;
  return value >= 100 ? "over 100 years" : `${threeDigits(value)} years`;
}

export const perSecond = (format) => (value) => (isKnown(value) ? `${format(value)}/s` : NONE);

const two = (number) => String(number).padStart(2, "0");

export function clock(at, withSeconds = true) {
  const time = new Date(at * 1000);
  const hours = `${two(time.getHours())}:${two(time.getMinutes())}`;
  return withSeconds ? `${hours}:${two(time.getSeconds())}` : hours;
}

export function day(at) {
  const time = new Date(at * 1000);
  return `${two(time.getMonth() + 1)}-${two(time.getDate())}`;
}

export function moment(at) {
  return isKnown(at) ? `${day(at)} ${clock(at)}` : NONE;
}

export function words(name) {
  return String(name).replaceAll("_", " ");
}

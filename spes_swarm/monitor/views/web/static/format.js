// Numbers, times and ids as text.

const NONE = "–";

/** 1234567 → "1.23 M"; small numbers keep their digits. */
export function count(value) {
  if (value == null) return NONE;
  for (const [size, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e4, " k"]]) {
    if (value >= size) {
      const scaled = value / (size === 1e4 ? 1e3 : size);
      return scaled.toFixed(scaled < 10 ? 2 : scaled < 100 ? 1 : 0) + unit;
    }
  }
  return whole(value);
}

/** With thousands separated. */
export function whole(value) {
  return value == null ? NONE : Math.round(value).toLocaleString("en-US");
}

export function loss(value) {
  return value == null ? NONE : value.toFixed(3);
}

/** A loss with its standard error, if that is known: 1.246 ± 0.031. */
export function lossWithError(value, error) {
  return value == null || error == null ? loss(value) : `${loss(value)} ± ${loss(error)}`;
}

/** 0.25 → "25 %". */
export function percent(value) {
  return value == null ? NONE : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

/** A multiple of something: 0.42 → "0.42 ×". */
export function share(value) {
  return value == null ? NONE : `${value.toFixed(2)} ×`;
}

export function bytes(value) {
  if (value == null) return NONE;
  for (const [size, unit] of [[2 ** 40, " TiB"], [2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"]]) {
    if (value >= size) {
      const scaled = value / size;
      return scaled.toFixed(scaled < 10 ? 2 : scaled < 100 ? 1 : 0) + unit;
    }
  }
  return `${Math.round(value)} B`;
}

/** Seconds → "4.2 s", "3 min 20 s", "2 h 5 min", "3 d". */
export function duration(seconds) {
  if (seconds == null) return NONE;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return s % 60 && s < 600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d`;
}

/** Whole seconds, so that it changes once a second, not at every update. */
export function age(seconds) {
  if (seconds == null) return NONE;
  const s = Math.max(0, Math.floor(seconds));
  return s < 10 ? `${s} s` : duration(s);
}

export function clockTime(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hour12: false });
}

export function dateTime(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleString([], { hour12: false });
}

export function plural(number, one, many = `${one}s`) {
  return `${whole(number)} ${number === 1 ? one : many}`;
}

/** [0, 1, 2, 5] → "0–2, 5". */
export function ranges(numbers) {
  const parts = [];
  for (let i = 0; i < numbers.length; i++) {
    const first = numbers[i];
    while (numbers[i + 1] === numbers[i] + 1) i++;
    parts.push(numbers[i] === first ? `${first}` : numbers[i] === first + 1 ? `${first}, ${numbers[i]}` : `${first}–${numbers[i]}`);
  }
  return parts.length ? parts.join(", ") : NONE;
}

/** The displayed name of a peer. */
export function peerName(peer) {
  return peer.name || peer.short_id;
}

// Where prompt tokens come from: the tiers, and computation.

export const SOURCES = ["device", "host", "disk", "remote", "recomputed"];
export const TIERS = SOURCES.slice(0, 4);
export const PROCESS_START = "process.start"; // 1 in the first step of each process of the server

export const label = (source) => (source === "recomputed" ? "computed" : source);

// Returns the tiers that the server has, or of which its history has tokens.
export function presentTiers(series, facts) {
  return TIERS.filter(
    (tier) =>
      series.now(`tier.${tier}.capacity`) !== null ||
      (tier === "remote" && Boolean(facts.remote)) ||
      (series.now(`tokens.${tier}`) ?? 0) > 0 ||
      series.of(`tokens.${tier}`).some((value) => value > 0),
  );
}

const LANE_LABELS = {
  device_to_host: "device → host",
  host_to_device: "host → device",
  host_to_disk: "host → disk",
  disk_to_host: "disk → host",
  host_to_remote: "host → remote",
  remote_to_host: "remote → host",
  store: "host → disk",
  load: "disk → host",
  put: "host → remote",
  get: "remote → host",
  digest: "checksums of new chunks",
  verify: "checks before reads",
};
const DISK_LANES = ["host_to_disk", "disk_to_host", "store", "load"];
const REMOTE_LANES = ["host_to_remote", "remote_to_host", "put", "get"];
const CHECK_LANES = ["digest", "verify"];
const UP_LANES = ["host_to_device", "disk_to_host", "remote_to_host", "load", "get", "verify"];

// A copy has the colour of the lower of its two tiers, and a dashed line if it goes up to the faster tier.
export class Lane {
  constructor(name) {
    this.name = name;
    this.label = LANE_LABELS[name] ?? name.replaceAll("_", " ");
    this.tier = DISK_LANES.includes(name) ? "disk" : REMOTE_LANES.includes(name) ? "remote" : "host";
    this.colour = CHECK_LANES.includes(name) ? "tone-2" : this.tier;
    this.dash = UP_LANES.includes(name) ? [6, 3] : undefined;
  }
}

// Returns the lanes between tiers that are present.
export function presentLanes(series, tiers) {
  return series.columns
    .filter((column) => /^lane\..*\.bytes$/.test(column) && series.now(column) !== null)
    .map((column) => new Lane(column.split(".")[1]))
    .filter((lane) => tiers.includes(lane.tier));
}

// The emulator's settings: environment variables ASCSIM_*, read once.
#pragma once
#include <cstdint>
#include <string>

namespace ascsim {

enum class Races { kOff, kReport, kRaise };

struct Settings {
  int64_t hbm_bytes;       // ASCSIM_HBM_MB: device memory
  double h2d_gbps;         // ASCSIM_H2D_GBPS: bandwidth of copies to the device; 0: as fast as the machine copies
  double d2h_gbps;         // ASCSIM_D2H_GBPS
  double copy_delay_us;    // ASCSIM_COPY_DELAY_US: added to every copy between host and device
  double op_delay_us;      // ASCSIM_OP_DELAY_US: an operator takes at least this
  double jitter_us;        // ASCSIM_JITTER_US: the most by which anything on a stream is delayed, with a seed
  bool random;             // ASCSIM_SEED is given
  uint64_t seed;           // ASCSIM_SEED
  Races races;             // ASCSIM_RACES: report (default), raise, off
  bool host_access;        // ASCSIM_HOST_ACCESS: watch the host's own reads and writes of pinned memory
  std::string races_file;      // ASCSIM_RACES_FILE
  std::string trace_file;      // ASCSIM_TRACE_FILE
  std::string counters_file;   // ASCSIM_COUNTERS_FILE
  bool dry_run;            // MindSpore's own MS_SIMULATION_LEVEL is set: nothing is computed
};

const Settings &settings();

}  // namespace ascsim

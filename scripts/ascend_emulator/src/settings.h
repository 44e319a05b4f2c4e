// The emulator's settings: environment variables ASCSIM_*, read once. Numbers can be changed later, with ascsim_set.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

namespace ascsim {

enum class Races { kOff, kReport, kRaise };

struct Settings {
  std::atomic<double> hbm_mb;         // ASCSIM_HBM_MB: device memory
  std::atomic<double> h2d_gbps;       // ASCSIM_H2D_GBPS: bandwidth of copies to the device; 0: that of this machine
  std::atomic<double> d2h_gbps;       // ASCSIM_D2H_GBPS
  std::atomic<double> copy_delay_us;  // ASCSIM_COPY_DELAY_US: added to every copy between host and device
  std::atomic<double> op_delay_us;    // ASCSIM_OP_DELAY_US: an operator takes at least this
  std::atomic<double> jitter_us;      // ASCSIM_JITTER_US: the most by which work on a stream is delayed, with a seed
  std::atomic<double> seed;           // ASCSIM_SEED: below 0, the schedule isn't random
  std::atomic<int> reseeded;          // how often the seed was set
  Races races;                        // ASCSIM_RACES: report (default), raise, off
  bool host_access;                   // ASCSIM_HOST_ACCESS: watch the host's own reads and writes of pinned memory
  std::string races_file;             // ASCSIM_RACES_FILE
  std::string trace_file;             // ASCSIM_TRACE_FILE
  std::string counters_file;          // ASCSIM_COUNTERS_FILE
  bool dry_run;                       // MindSpore's own MS_SIMULATION_LEVEL is set: nothing is computed
};

Settings &settings();

inline int64_t hbm_bytes() { return static_cast<int64_t>(settings().hbm_mb * (1 << 20)); }

}  // namespace ascsim

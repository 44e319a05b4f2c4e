#include "settings.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <map>

extern char **environ;

namespace ascsim {
namespace {

[[noreturn]] void refuse(const char *name, const char *value, const char *expected) {
  fprintf(stderr, "ascend emulator: %s must be %s, not '%s'\n", name, expected, value);
  fflush(stderr);
  _exit(2);
}

double number(const char *name, double standard) {
  const char *value = getenv(name);
  if (value == nullptr || *value == 0) return standard;
  char *end = nullptr;
  double result = strtod(value, &end);
  if (*end != 0 || !(result >= 0)) refuse(name, value, "a number of at least 0");
  return result;
}

std::string text(const char *name) {
  const char *value = getenv(name);
  return value != nullptr ? value : "";
}

Races races_setting() {
  std::string value = text("ASCSIM_RACES");
  if (value.empty() || value == "report") return Races::kReport;
  if (value == "raise") return Races::kRaise;
  if (value == "off") return Races::kOff;
  refuse("ASCSIM_RACES", value.c_str(), "raise, report or off");
}

// A misspelt setting would silently change nothing.
void refuse_unknown_names() {
  const auto known = {"ASCSIM_HBM_MB",      "ASCSIM_H2D_GBPS",  "ASCSIM_D2H_GBPS",   "ASCSIM_COPY_DELAY_US",
                      "ASCSIM_OP_DELAY_US", "ASCSIM_JITTER_US", "ASCSIM_SEED",       "ASCSIM_RACES",
                      "ASCSIM_RACES_FILE",  "ASCSIM_TRACE_FILE", "ASCSIM_COUNTERS_FILE", "ASCSIM_HOST_ACCESS",
                      "ASCSIM_BUILD_DIR",   "ASCSIM_LIBRARY"};
  for (char **variable = environ; *variable != nullptr; ++variable) {
    if (strncmp(*variable, "ASCSIM_", 7) != 0) continue;
    std::string name(*variable, strcspn(*variable, "="));
    bool found = false;
    for (const char *one : known) found = found || name == one;
    if (!found) {
      fprintf(stderr, "ascend emulator: there is no setting %s; the settings are:", name.c_str());
      for (const char *one : known) fprintf(stderr, " %s", one);
      fprintf(stderr, "\n");
      fflush(stderr);
      _exit(2);
    }
  }
}

Settings *read_settings() {
  refuse_unknown_names();
  auto *result = new Settings{};
  result->hbm_mb = number("ASCSIM_HBM_MB", 65536);
  result->h2d_gbps = number("ASCSIM_H2D_GBPS", 0);
  result->d2h_gbps = number("ASCSIM_D2H_GBPS", 0);
  result->copy_delay_us = number("ASCSIM_COPY_DELAY_US", 0);
  result->op_delay_us = number("ASCSIM_OP_DELAY_US", 0);
  result->seed = number("ASCSIM_SEED", -1);
  result->jitter_us = number("ASCSIM_JITTER_US", 300);
  result->races = races_setting();
  result->host_access = number("ASCSIM_HOST_ACCESS", 1) != 0;
  result->races_file = text("ASCSIM_RACES_FILE");
  result->trace_file = text("ASCSIM_TRACE_FILE");
  result->counters_file = text("ASCSIM_COUNTERS_FILE");
  result->dry_run = !text("MS_SIMULATION_LEVEL").empty();
  return result;
}

}  // namespace

Settings &settings() {
  static Settings *one = read_settings();
  return *one;
}

// Returns 0, or 1 if there is no such number.
extern "C" __attribute__((visibility("default"))) int ascsim_set(const char *name, double value) {
  Settings &all = settings();
  const std::map<std::string, std::atomic<double> *> numbers{
    {"ASCSIM_HBM_MB", &all.hbm_mb},           {"ASCSIM_H2D_GBPS", &all.h2d_gbps},
    {"ASCSIM_D2H_GBPS", &all.d2h_gbps},       {"ASCSIM_COPY_DELAY_US", &all.copy_delay_us},
    {"ASCSIM_OP_DELAY_US", &all.op_delay_us}, {"ASCSIM_JITTER_US", &all.jitter_us},
    {"ASCSIM_SEED", &all.seed},
  };
  auto found = numbers.find(name);
  if (found == numbers.end() || !(value >= 0)) return 1;
  *found->second = value;
  if (found->second == &all.seed) ++all.reseeded;
  return 0;
}

}  // namespace ascsim

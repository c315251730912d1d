#include "clo/report.h"

namespace clo {

KvCounters& KvCounters::operator+=(const KvCounters& other) {
  hits += other.hits;
  misses += other.misses;
  aged += other.aged;
  incomplete += other.incomplete;
  corrections += other.corrections;
  resident_selections += other.resident_selections;
  rows_requested += other.rows_requested;
  rows_fetched += other.rows_fetched;
  rows_saved_by_delta += other.rows_saved_by_delta;
  rows_saved_by_hits += other.rows_saved_by_hits;
  rows_primed += other.rows_primed;
  rows_restored += other.rows_restored;
  rows_offloaded += other.rows_offloaded;
  rows_attended += other.rows_attended;
  rows_in_context += other.rows_in_context;
  oracle_rows += other.oracle_rows;
  mass_kept += other.mass_kept;
  mass_samples += other.mass_samples;
  return *this;
}

}  // namespace clo

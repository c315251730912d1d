#include <algorithm>

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
  full_rows_attended += other.full_rows_attended;
  rows_in_context += other.rows_in_context;
  oracle_rows += other.oracle_rows;
  wait_ns += other.wait_ns;
  kept_sets += other.kept_sets;
  hidden_changes += other.hidden_changes;
  mass_kept += other.mass_kept;
  mass_samples += other.mass_samples;
  query_cosine += other.query_cosine;
  query_cosine_samples += other.query_cosine_samples;
  watched_rows += other.watched_rows;
  watched_rows_attended += other.watched_rows_attended;
  return *this;
}

double KvCounters::hit_rate() const {
  if (decisions() == 0) return 0;
  // A head whose prediction missed can be refuted as well: then one decision is two refreshes.
  return static_cast<double>(std::max<int64_t>(hits - corrections, 0)) /
         static_cast<double>(decisions());
}

double KvCounters::mean_mass_kept() const {
  return mass_samples == 0 ? 0 : mass_kept / static_cast<double>(mass_samples);
}

double KvCounters::mean_query_cosine() const {
  return query_cosine_samples == 0 ? 0 : query_cosine / static_cast<double>(query_cosine_samples);
}

}  // namespace clo

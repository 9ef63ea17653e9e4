// Shares work out to a few threads without ever waiting for one that has not come.
//
// OpenMP's regions end when every thread has passed them. On a machine whose cores are shared, a
// thread that the system has put aside holds up the others then, at each of a step's 150 regions:
// beside one busy process a step took up to twenty times as long. Here helpers take part if they
// are there in time; whoever is there does the work, and only a unit that a helper has begun is
// waited for.
#pragma once
#include <cstdint>

namespace quire {

using UnitBody = void (*)(const void* with, int64_t unit);

// Calls body(with, unit) once for each of 0 .. units - 1, in any order, and returns when all are
// done. At most torch's number of threads take part. Callers on several threads do not mix: who
// finds the helpers taken works alone.
void share_out(int64_t units, UnitBody body, const void* with);

// Of the caller and its helpers at most: torch's number of threads.
int num_threads();

template <class Body>
void for_units(int64_t units, const Body& body) {
  share_out(
      units, [](const void* with, int64_t unit) { (*static_cast<const Body*>(with))(unit); },
      &body);
}

}  // namespace quire

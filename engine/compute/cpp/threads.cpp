// Which OpenMP runtime these kernels were bound to: it must be the one that torch uses.
#include <omp.h>

extern "C" void *sojourn_openmp_runtime() { return reinterpret_cast<void *>(&omp_get_max_threads); }

/* All that is compiled once per instruction set. */
#include "tile.h"

#include "lattice.h"

#include "difference.h"

#undef KEEPS_HASHES
#undef vf
#undef vi
#undef vu
#undef DOWN
#undef UP
#undef BUTTERFLY

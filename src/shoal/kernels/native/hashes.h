// The random numbers of messages, as hashes of 64-bit keys, four at a time.
#pragma once

#include <cstdint>

namespace shoal {

typedef uint64_t Words __attribute__((vector_size(32)));

// SplitMix64's finaliser (Steele, Lea, Flood 2014).
inline Words hashed(Words z) {
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace shoal

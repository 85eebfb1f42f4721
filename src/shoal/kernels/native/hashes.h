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

// Whether this CPU multiplies 64-bit integers by one instruction. AVX2 takes seven, and hashes are mostly products.
extern bool multiplies_words;

// Call `work`, compiled with such instructions where the CPU has them. Integers, and numbers rounded at each operation,
// are the same by any instructions.
#if defined(__x86_64__)
template <class Work>
[[gnu::target("avx512f,avx512dq,avx512vl"), gnu::flatten]] void multiplying_words(Work work) {
  work();
}
template <class Work>
inline void for_this_cpu(Work work) {
  if (multiplies_words)
    multiplying_words(work);
  else
    work();
}
#else
template <class Work>
inline void for_this_cpu(Work work) {
  work();
}
#endif

}  // namespace shoal

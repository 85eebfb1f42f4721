// Which numbers sparse messages have, and the positions of these in few bytes.
//
// Each has the results of the operations of torch and numpy in shoal/compression, which compute the same without this.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "hashes.h"

namespace shoal {

// Magnitudes of eight numbers as whole numbers of the same order; a NaN counts as infinite.
typedef int32_t Eight __attribute__((vector_size(32)));
constexpr int32_t INFINITE = 0x7f800000;

inline Eight magnitudes(Eight bits) {
  bits &= 0x7fffffff;
  return bits < INFINITE ? bits : Eight{} + INFINITE;
}

inline Eight eight_at(const float* x) {
  Eight bits;
  std::memcpy(&bits, x, sizeof bits);
  return bits;
}

// One bit for each number of which the mask is set.
inline unsigned bits_of(Eight mask) {
#if defined(__x86_64__)
  return unsigned(_mm256_movemask_ps(reinterpret_cast<__m256>(mask)));
#else
  unsigned bits = 0;
  for (unsigned j = 0; j < 8; j++) bits |= unsigned(mask[j] & 1) << j;
  return bits;
#endif
}

// For each mask of eight bits the places of its set bits, a byte each.
constexpr std::array<uint64_t, 256> set_bits() {
  std::array<uint64_t, 256> found{};
  for (unsigned mask = 0; mask < 256; mask++)
    for (unsigned j = 0, at = 0; j < 8; j++)
      if (mask >> j & 1) found[mask] |= uint64_t(j) << at, at += 8;
  return found;
}
constexpr std::array<uint64_t, 256> SET_BITS = set_bits();

// Write the numbers whose bit is set, one after the other, and return the end. All eight of `out` are overwritten.
inline int32_t* compact(Eight numbers, unsigned bits, int32_t* out) {
#if defined(__x86_64__)
  const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(SET_BITS[bits])));
  const __m256i found = _mm256_permutevar8x32_epi32(reinterpret_cast<__m256i>(numbers), order);
  std::memcpy(out, &found, sizeof found);
#else
  for (unsigned left = bits, at = 0; left; left &= left - 1, at++) out[at] = numbers[__builtin_ctz(left)];
#endif
  return out + __builtin_popcount(bits);
}

// Call `take(first, bits, count)` with the bits of eight numbers from place `first` on, of which the last may be fewer.
template <class Take>
inline void for_each_eight(const float* x, size_t n, Take take) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) take(i, eight_at(x + i), 8u);
  if (i == n) return;
  float padded[8] = {};
  std::memcpy(padded, x + i, (n - i) * sizeof(float));
  take(i, eight_at(padded), unsigned(n - i));
}

struct Bounds {
  int32_t low, high;
};

// Magnitudes between which the k-th largest probably is, four standard deviations apart on either side: those of a
// sample. A vector that is not much longer than the sample is not worth one.
inline Bounds probable_bounds(const float* x, size_t n, size_t k, int32_t* room) {
  constexpr size_t SAMPLE = 1 << 15;
  if (n < 4 * SAMPLE) return {0, INFINITE};
  const size_t stride = n / SAMPLE;
  for (size_t i = 0; i < SAMPLE; i++) {
    // One of each stretch, at a place that changes: numbers may have a period, like the rows of a matrix.
    const uint32_t chance = uint32_t(i) * 0x9e3779b9u;
    int32_t bits;
    std::memcpy(&bits, x + i * stride + (uint64_t(chance) * stride >> 32), sizeof bits);
    room[i] = std::min(bits & 0x7fffffff, INFINITE);
  }
  const double rank = double(k) / double(n) * SAMPLE;
  const double margin = 4 * std::sqrt(rank * (1 - rank / SAMPLE)) + 4;
  Bounds bounds = {0, INFINITE};
  int32_t* begin = room;
  if (rank > margin) {
    int32_t* nth = begin + size_t(rank - margin);
    std::nth_element(begin, nth, room + SAMPLE, std::greater<int32_t>());
    bounds.high = *nth, begin = nth;
  }
  if (rank + margin < SAMPLE - 1) {
    int32_t* nth = room + size_t(rank + margin) + 1;
    std::nth_element(begin, nth, room + SAMPLE, std::greater<int32_t>());
    bounds.low = *nth;
  }
  return bounds;
}

struct Least {
  int32_t size;
  size_t equal;  // how many of the numbers of this magnitude are among the largest
};

// The k-th largest magnitude. `room` has n + 8 whole numbers.
//
// One pass counts the numbers above bounds and copies those between them, among which the k-th is searched. Where the
// bounds were wrong another pass takes the numbers on the other side. Bounds are equal where many numbers are, often
// zeros: such numbers are not copied.
inline Least kth_largest(const float* x, size_t n, size_t k, int32_t* room) {
  Bounds bounds = probable_bounds(x, n, k, room);
  for (;;) {
    const bool copies = bounds.low < bounds.high;
    Eight lanes = {};
    size_t between = 0;
    int32_t* end = room;
    for_each_eight(x, n, [&](size_t, Eight bits, unsigned count) {
      const Eight sizes = magnitudes(bits);
      const Eight above = sizes > bounds.high;
      lanes -= above;  // zeros that only fill up are never above
      const unsigned found = bits_of((sizes >= bounds.low) & ~above) & ((1u << count) - 1);
      if (found && copies) end = compact(sizes, found, end);
      between += size_t(__builtin_popcount(found));
    });
    size_t above = 0;
    for (unsigned j = 0; j < 8; j++) above += size_t(lanes[j]);
    if (above >= k) {
      bounds = {bounds.high + 1, INFINITE};
    } else if (above + between < k) {
      bounds = {0, bounds.low - 1};
    } else if (!copies) {
      return {bounds.low, k - above};
    } else {
      int32_t* nth = room + (k - above - 1);
      std::nth_element(room, nth, end, std::greater<int32_t>());
      Least least = {*nth, k - above};
      for (const int32_t* one = room; one < end; one++) least.equal -= *one > least.size;
      return least;
    }
  }
}

// Places of the k numbers of largest magnitude, ascending; of equals the first.
inline void largest(const float* x, size_t n, size_t k, int32_t* room, int64_t* places) {
  Least least = kth_largest(x, n, k, room);
  [[maybe_unused]] const int64_t* const end = places + k;
  for_each_eight(x, n, [&](size_t first, Eight bits, unsigned count) {
    const Eight sizes = magnitudes(bits);
    unsigned wanted = bits_of(sizes >= least.size) & ((1u << count) - 1);
    unsigned equal = bits_of(sizes == least.size) & wanted;
    if (equal) {
      for (; equal && least.equal; equal &= equal - 1) least.equal--;
      wanted &= ~equal;
    }
#if defined(__x86_64__)
    if (places + 8 <= end) {  // what is written beyond those wanted is overwritten by the next
      const __m128i order = _mm_cvtsi64_si128(int64_t(SET_BITS[wanted]));
      const __m256i from = _mm256_set1_epi64x(int64_t(first));
      const __m256i low = _mm256_add_epi64(from, _mm256_cvtepu8_epi64(order));
      const __m256i high = _mm256_add_epi64(from, _mm256_cvtepu8_epi64(_mm_srli_si128(order, 4)));
      std::memcpy(places, &low, sizeof low), std::memcpy(places + 4, &high, sizeof high);
      places += __builtin_popcount(wanted);
      return;
    }
#endif
    for (; wanted; wanted &= wanted - 1) *places++ = int64_t(first) + __builtin_ctz(wanted);
  });
}

// The number below one of the upper 53 bits of a hash, in double; rounded to float if that is what is drawn.
inline double below_one(uint64_t bits, bool wide) {
  const double exact = double(bits) * 0x1p-53;
  return wide ? exact : double(std::min(float(exact), 1 - 0x1p-24f));
}

struct Candidate {
  double drawn;
  size_t at;  // which of the places it is
};

// Places of the k largest of n numbers that are hashes of `key` and the place, ascending; of equals the first.
//
// Hashes have the upper bits `low` or more for somewhat more than k places, probably, and `high` or more for fewer. Those
// between are `candidates`. Returns whether that was so, and the memory sufficed: `most_places` and `most_candidates`.
inline bool drawn_largest(bool wide, uint64_t key, size_t n, size_t k, uint64_t low, uint64_t high, int64_t* places,
                          size_t most_places, Candidate* candidates, size_t most_candidates, double* room) {
  size_t count = 0, between = 0;
  const auto take = [&](size_t place, uint64_t bits) {
    if (count == most_places) return false;
    if (bits < high) {
      if (between == most_candidates) return false;
      candidates[between++] = {below_one(bits, wide), count};
    }
    places[count++] = int64_t(place);
    return true;
  };
  // Upper bits are less than 2^53, so comparisons of signed numbers do, for which there are instructions.
  typedef int64_t Signed __attribute__((vector_size(32)));
  const Signed least = Signed{} + int64_t(low);
  Words keys = Words{0, 1, 2, 3} + key;
  for (size_t i = 0; i < n; i += 8, keys += 8) {
    const Words one = hashed(keys) >> 11, other = hashed(keys + 4) >> 11;
    const Signed first = Signed(one) >= least, second = Signed(other) >= least;
#if defined(__x86_64__)
    const __m256d a = reinterpret_cast<__m256d>(first), b = reinterpret_cast<__m256d>(second);
    unsigned wanted = unsigned(_mm256_movemask_pd(a)) | unsigned(_mm256_movemask_pd(b)) << 4;
#else
    unsigned wanted = 0;
    for (unsigned j = 0; j < 4; j++) wanted |= unsigned(first[j] & 1) << j | unsigned(second[j] & 1) << (4 + j);
#endif
    if (!wanted) continue;
    if (n - i < 8) wanted &= (1u << (n - i)) - 1;
    uint64_t bits[8];
    std::memcpy(bits, &one, sizeof one), std::memcpy(bits + 4, &other, sizeof other);
    for (; wanted; wanted &= wanted - 1) {
      const unsigned j = unsigned(__builtin_ctz(wanted));
      if (!take(i + j, bits[j])) return false;
    }
  }
  const size_t above = count - between;
  if (count < k || above >= k) return false;
  for (size_t i = 0; i < between; i++) room[i] = candidates[i].drawn;
  double* const nth = room + (k - above - 1);
  std::nth_element(room, nth, room + between, std::greater<double>());
  const double last = *nth;
  // Rounding may make a number outside of the bounds equal to one between them.
  if ((low && last <= below_one(low, wide)) || (above && last >= below_one(high, wide))) return false;
  size_t equal = k - above;
  for (const double* one = room; one < room + between; one++) equal -= *one > last;
  // Close up the places that are left.
  size_t to = 0, from = 0;
  for (size_t i = 0; i < between; i++) {
    if (candidates[i].drawn > last || (candidates[i].drawn == last && equal && equal--)) continue;
    const size_t kept = candidates[i].at - from;
    if (to != from) std::memmove(places + to, places + from, kept * sizeof *places);
    to += kept, from = candidates[i].at + 1;
  }
  if (to != from) std::memmove(places + to, places + from, (count - from) * sizeof *places);
  return true;
}

// A row of bits that is written from its begin on, 64 at a time. Bits are set in ascending order.
class BitRow {
 public:
  BitRow(uint8_t* bytes, size_t bits) : bytes_(bytes), length_((bits + 7) / 8) { std::memset(bytes_, 0, length_); }

  void set(size_t at) {
    if (at / 64 != word_) write(), word_ = at / 64, bits_ = 0;
    bits_ |= uint64_t(1) << at % 64;
  }
  void write() {
    std::memcpy(bytes_ + 8 * word_, &bits_, std::min(size_t(8), length_ - 8 * word_));
  }

 private:
  uint8_t* bytes_;
  size_t length_, word_ = 0;
  uint64_t bits_ = 0;
};

// Call `take(place)` for each set bit of bytes, until it returns false. Returns whether it never did.
template <class Take>
inline bool for_each_bit(const uint8_t* bytes, size_t length, Take take) {
  for (size_t at = 0; at < length; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, std::min(size_t(8), length - at));
    for (; word; word &= word - 1)
      if (!take(8 * at + size_t(__builtin_ctzll(word)))) return false;
  }
  return true;
}

// The lowest `low` bits of k places: a byte plane for every eight, then the rest of each packed, eight in so many bytes.
struct LowBits {
  size_t k;
  unsigned planes, rest;

  LowBits(size_t k, unsigned low) : k(k), planes(low / 8), rest(low % 8) {}
  size_t bytes() const { return planes * k + (k * rest + 7) / 8; }

  void write(const int64_t* places, uint8_t* data) const {
    for (unsigned plane = 0; plane < planes; plane++)
      for (size_t i = 0; i < k; i++) *data++ = uint8_t(places[i] >> 8 * plane);
    if (!rest) return;
    const uint64_t mask = (uint64_t(1) << rest) - 1;
    for (size_t i = 0; i < k; i += 8, data += rest) {
      const size_t here = std::min(k - i, size_t(8));
      uint64_t packed = 0;
      for (size_t j = 0; j < here; j++) packed |= (uint64_t(places[i + j]) >> 8 * planes & mask) << j * rest;
      std::memcpy(data, &packed, (here * rest + 7) / 8);
    }
  }

  // Returns whether the unused bits are zero.
  bool read(const uint8_t* data, int64_t* places) const {
    std::fill(places, places + k, 0);
    for (unsigned plane = 0; plane < planes; plane++)
      for (size_t i = 0; i < k; i++) places[i] |= int64_t(*data++) << 8 * plane;
    if (!rest) return true;
    const uint64_t mask = (uint64_t(1) << rest) - 1;
    uint64_t packed = 0;
    for (size_t i = 0; i < k; i += 8, data += rest) {
      const size_t here = std::min(k - i, size_t(8));
      packed = 0;
      std::memcpy(&packed, data, (here * rest + 7) / 8);
      for (size_t j = 0; j < here; j++, packed >>= rest) places[i + j] |= int64_t(packed & mask) << 8 * planes;
    }
    return !packed;
  }
};

// The forms of shoal/compression/bits.py: a bit for each of d places, or Elias and Fano's with `low` bits apart.
inline void write_places(const int64_t* places, size_t k, size_t d, unsigned low, bool one_bit, uint8_t* data) {
  if (one_bit) {
    BitRow row(data, d);
    for (size_t i = 0; i < k; i++) row.set(size_t(places[i]));
    return row.write();
  }
  const LowBits lowest(k, low);
  lowest.write(places, data);
  BitRow row(data + lowest.bytes(), k + ((d - 1) >> low));
  for (size_t i = 0; i < k; i++) row.set((size_t(places[i]) >> low) + i);
  row.write();
}

// Returns whether they are k ascending places below d.
inline bool read_places(const uint8_t* data, size_t k, size_t d, unsigned low, bool one_bit, int64_t* places) {
  size_t count = 0;
  if (one_bit) {
    const bool whole = for_each_bit(data, (d + 7) / 8, [&](size_t at) {
      if (count == k || at >= d) return false;
      places[count++] = int64_t(at);
      return true;
    });
    return whole && count == k;
  }
  const LowBits lowest(k, low);
  if (!lowest.read(data, places)) return false;
  int64_t before = -1;
  const bool whole = for_each_bit(data + lowest.bytes(), (k + ((d - 1) >> low) + 7) / 8, [&](size_t at) {
    if (count == k) return false;
    const int64_t place = places[count] | int64_t(at - count) << low;
    if (place <= before || size_t(place) >= d) return false;
    before = places[count++] = place;
    return true;
  });
  return whole && count == k;
}

}  // namespace shoal

extern "C" {

// `room` has n + 8 whole numbers of 32 bits, `places` k of 64.
int shoal_largest(const float* x, size_t n, size_t k, int32_t* room, int64_t* places) {
  if (!k || k > n) return 1;
  shoal::largest(x, n, k, room, places);
  return 0;
}

// `places` has `most_places` whole numbers of 64 bits, of which the first k are the result; `room` three numbers of 64
// bits for each of `most_candidates`. 1 where another way has to compute it.
int shoal_drawn_largest(int wide, uint64_t key, size_t n, size_t k, uint64_t low, uint64_t high, int64_t* places,
                        size_t most_places, void* room, size_t most_candidates) {
  shoal::Candidate* const candidates = static_cast<shoal::Candidate*>(room);
  double* const rest = reinterpret_cast<double*>(candidates + most_candidates);
  bool found = false;
  shoal::for_this_cpu([&] {
    found = shoal::drawn_largest(wide != 0, key, n, k, low, high, places, most_places, candidates, most_candidates, rest);
  });
  return !found;
}

int shoal_write_places(const int64_t* places, size_t k, size_t d, unsigned low, int one_bit, uint8_t* data) {
  shoal::write_places(places, k, d, low, one_bit != 0, data);
  return 0;
}

// 1 where the bytes are not k ascending places below d.
int shoal_read_places(const uint8_t* data, size_t k, size_t d, unsigned low, int one_bit, int64_t* places) {
  return !shoal::read_places(data, k, d, low, one_bit != 0, places);
}

}

// Tiles: so many numbers of a tensor as a few vector registers hold. Every kernel reads a tile of each input, computes in
// registers, and writes one tile.
//
// Numbers are computed in float, or in double for double. Compile with -ffp-contract=off: only fma() below is fused, so
// that results have the bits of torch's operations, which round each product and each sum but those of add(alpha=).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shoal {

constexpr size_t VECTOR_BYTES = 32;
constexpr int MOST_INPUTS = 64;

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// What numbers of a type are computed in.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef double Doubles __attribute__((vector_size(VECTOR_BYTES)));
template <class W>
using Vector = std::conditional_t<std::is_same_v<W, double>, Doubles, Floats>;

#if defined(__x86_64__)
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
#else
template <class V>
inline V fma(V a, V b, V c) {
  for (size_t j = 0; j < sizeof(V) / sizeof(a[0]); j++) c[j] = std::fma(a[j], b[j], c[j]);
  return c;
}
#endif

template <class W>
struct Tile {
  static constexpr size_t LENGTH = 4 * VECTOR_BYTES / sizeof(W);
  Vector<W> a, b, c, d;
};

template <class W>
inline Tile<W> operator+(const Tile<W>& x, const Tile<W>& y) {
  return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d};
}
template <class W>
inline Tile<W> operator*(const Tile<W>& x, const Tile<W>& y) {
  return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d};
}
template <class W>
inline Tile<W> operator*(const Tile<W>& x, W y) {
  return {x.a * y, x.b * y, x.c * y, x.d * y};
}
template <class W>
inline Tile<W> operator/(const Tile<W>& x, W y) {
  return {x.a / y, x.b / y, x.c / y, x.d / y};
}
// x * y + z, rounded once.
template <class W>
inline Tile<W> fma(const Tile<W>& x, W y, const Tile<W>& z) {
  const Vector<W> all = y - Vector<W>{};  // 0 + y would lose the sign of -0
  return {fma(x.a, all, z.a), fma(x.b, all, z.b), fma(x.c, all, z.c), fma(x.d, all, z.d)};
}

template <class V, class T>
inline V vector_at(const T* from) {
  V vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class T>
inline Tile<T> load(const T* from) {
  using V = Vector<T>;
  constexpr size_t N = VECTOR_BYTES / sizeof(T);
  return {vector_at<V>(from), vector_at<V>(from + N), vector_at<V>(from + 2 * N), vector_at<V>(from + 3 * N)};
}
template <class T>
inline void store(const Tile<T>& tile, T* to) {
  std::memcpy(to, &tile, sizeof tile);
}

#if defined(__x86_64__)
inline __m128i halves_at(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }

inline Floats widened(const Half* from) { return _mm256_cvtph_ps(halves_at(from)); }
inline Floats widened(const BFloat16* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves_at(from)), 16));
}
// Rounded to the nearest, ties to even.
inline void narrow(Floats numbers, Half* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(numbers, 0));
}
inline void narrow(Floats numbers, BFloat16* to) {
  const __m256i bits = _mm256_castps_si256(numbers);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i raised = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  // A NaN stays one: raised, its bits could be those of infinity, or of a number.
  const __m256i isnan = _mm256_castps_si256(_mm256_cmp_ps(numbers, numbers, _CMP_UNORD_Q));
  const __m256i rounded = _mm256_srli_epi32(_mm256_blendv_epi8(raised, _mm256_set1_epi32(0x7fc00000), isnan), 16);
  const __m128i low = _mm256_castsi256_si128(rounded), high = _mm256_extracti128_si256(rounded, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(low, high));
}
#else
inline float widened(Half half) {
  __fp16 number;
  std::memcpy(&number, &half, sizeof number);
  return number;
}
inline float widened(BFloat16 half) {
  const uint32_t bits = uint32_t(half.bits) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}
template <class T>
inline Floats widened(const T* from) {
  Floats numbers;
  for (size_t j = 0; j < 8; j++) numbers[j] = widened(from[j]);
  return numbers;
}
inline void narrow(Floats numbers, Half* to) {
  for (size_t j = 0; j < 8; j++) {
    const __fp16 number = __fp16(numbers[j]);
    std::memcpy(to + j, &number, sizeof number);
  }
}
inline void narrow(Floats numbers, BFloat16* to) {
  for (size_t j = 0; j < 8; j++) {
    const float number = numbers[j];
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    to[j].bits = number != number ? 0x7fc0u : uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
}
#endif

inline Tile<float> load(const Half* from) {
  return {widened(from), widened(from + 8), widened(from + 16), widened(from + 24)};
}
inline Tile<float> load(const BFloat16* from) {
  return {widened(from), widened(from + 8), widened(from + 16), widened(from + 24)};
}
inline void store(const Tile<float>& tile, Half* to) {
  narrow(tile.a, to), narrow(tile.b, to + 8), narrow(tile.c, to + 16), narrow(tile.d, to + 24);
}
inline void store(const Tile<float>& tile, BFloat16* to) {
  narrow(tile.a, to), narrow(tile.b, to + 8), narrow(tile.c, to + 16), narrow(tile.d, to + 24);
}

// Write a tile past the caches: memory need not be read first for what is overwritten whole, and the caches keep what is
// read sooner. `to` is a multiple of VECTOR_BYTES.
template <class T>
inline void store_streaming(const Tile<Wide<T>>& tile, T* to) {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<T, Wide<T>>) {
    const Vector<T>* from = &tile.a;
    for (size_t k = 0; k < 4; k++)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + k, reinterpret_cast<__m256i>(from[k]));
    return;
  }
  alignas(VECTOR_BYTES) T numbers[Tile<Wide<T>>::LENGTH];
  store(tile, numbers);
  const __m256i* from = reinterpret_cast<const __m256i*>(numbers);
  for (size_t k = 0; k < sizeof numbers / VECTOR_BYTES; k++)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + k, _mm256_load_si256(from + k));
#else
  store(tile, to);
#endif
}

// Copy `bytes` past the caches.
inline void copy_streaming(char* to, const char* from, size_t bytes) {
#if defined(__x86_64__)
  const size_t misaligned = reinterpret_cast<uintptr_t>(to) % VECTOR_BYTES;
  size_t at = misaligned ? VECTOR_BYTES - misaligned : 0;
  if (at > bytes) at = bytes;
  std::memcpy(to, from, at);
  for (; at + 4 * VECTOR_BYTES <= bytes; at += 4 * VECTOR_BYTES) {
    const __m256i* source = reinterpret_cast<const __m256i*>(from + at);
    __m256i* target = reinterpret_cast<__m256i*>(to + at);
    const __m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);
    const __m256i c = _mm256_loadu_si256(source + 2), d = _mm256_loadu_si256(source + 3);
    _mm256_stream_si256(target, a), _mm256_stream_si256(target + 1, b);
    _mm256_stream_si256(target + 2, c), _mm256_stream_si256(target + 3, d);
  }
  std::memcpy(to + at, from + at, bytes - at);
  _mm_sfence();
#else
  std::memcpy(to, from, bytes);
#endif
}

// Call `kernel` with a count: as a type if it is small, so that loops over the inputs are unrolled.
template <class Kernel>
inline void with_count(int count, Kernel kernel) {
  switch (count) {
    case 2: return kernel(std::integral_constant<int, 2>{});
    case 3: return kernel(std::integral_constant<int, 3>{});
    case 4: return kernel(std::integral_constant<int, 4>{});
    case 5: return kernel(std::integral_constant<int, 5>{});
  }
  kernel(count);
}

inline void end_of_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Where a result of `length` numbers goes: to `out`, and to `also` if that is not null. With `streams` it is written past
// the caches; both must then be as far from a multiple of VECTOR_BYTES, and be aligned to their type.
template <class T>
struct Result {
  T* out;
  T* also;
  size_t length;
  bool streams;
};

// out[tile] = compute(in[tile], ...) for all numbers; `compute` takes where the tile of each input begins. Numbers that
// fill no tile are copied to one: all are computed alike. A tile of all inputs is read before it is written, so `out` may
// be an input. A `count` that is a type has its inputs in registers.
template <class T, class Count, class Compute>
inline void for_each_tile(const Result<T>& result, const T* const* in, Count count, Compute compute) {
  T *const out = result.out, *const also = result.also;
  const size_t length = result.length;
  const bool streams = result.streams;
  constexpr size_t LENGTH = Tile<Wide<T>>::LENGTH;
  const T *begin[MOST_INPUTS], *at[MOST_INPUTS];
  for (int k = 0; k < count; k++) begin[k] = in[k];
  const auto part = [&](size_t place, size_t numbers) {
    T padded[MOST_INPUTS][LENGTH], computed[LENGTH];
    for (int k = 0; k < count; k++) {
      std::memset(static_cast<void*>(padded[k]), 0, sizeof padded[k]);
      std::memcpy(static_cast<void*>(padded[k]), begin[k] + place, numbers * sizeof(T));
      at[k] = padded[k];
    }
    store(compute(at), computed);
    std::memcpy(static_cast<void*>(out + place), computed, numbers * sizeof(T));
    if (also) std::memcpy(static_cast<void*>(also + place), computed, numbers * sizeof(T));
  };
  size_t place = 0;
  if (streams) {
    const size_t misaligned = reinterpret_cast<uintptr_t>(out) % VECTOR_BYTES;
    const size_t head = misaligned ? (VECTOR_BYTES - misaligned) / sizeof(T) : 0;
    if (head && head <= length) part(0, head), place = head;
  }
  for (; place + LENGTH <= length; place += LENGTH) {
    for (int k = 0; k < count; k++) at[k] = begin[k] + place;
    const Tile<Wide<T>> tile = compute(at);
    if (streams) {
      store_streaming(tile, out + place);
      if (also) store_streaming(tile, also + place);
    } else {
      store(tile, out + place);
      if (also) store(tile, also + place);
    }
  }
  if (place < length) part(place, length - place);
  if (streams) end_of_streaming();
}

}  // namespace shoal

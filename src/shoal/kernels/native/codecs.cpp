// What compressors do to each number: random numbers, steps of a grid, codes of a few bits.
//
// Each has the bits of the operations of torch and numpy in shoal/compression, which compute the same without this.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "hashes.h"

namespace shoal {

constexpr size_t BLOCK = 1024;

typedef double Doubles __attribute__((vector_size(32)));

// Whole numbers below 2^52, put into the significand of 2^52.
inline Doubles as_doubles(Words whole) {
  whole |= 0x4330000000000000u;
  Doubles numbers;
  std::memcpy(&numbers, &whole, sizeof numbers);
  return numbers - 0x1p52;
}

// The upper 53 bits of hashes, divided by 2^53: exact in double, rounded once for float.
inline Doubles below_one(Words hash) {
  const Words bits = hash >> 11;
  return (as_doubles(bits >> 32) * 0x1p32 + as_doubles(bits & 0xffffffffu)) * 0x1p-53;
}

typedef float FourFloats __attribute__((vector_size(16)));
template <class W>
using Four = std::conditional_t<std::is_same_v<W, double>, Doubles, FourFloats>;

// Hashes of four keys as numbers below one. Rounding would make some floats one: the largest below is taken.
template <class W>
inline Four<W> four_below_one(Words keys) {
  const Four<W> most = Four<W>{} + (W(1) - std::numeric_limits<W>::epsilon() / 2);
  const Four<W> drawn = __builtin_convertvector(below_one(hashed(keys)), Four<W>);
  return drawn < most ? drawn : most;
}

// out[i] is the hash of key + i.
template <class W>
void uniform(W* out, uint64_t key, size_t n) {
  Words keys = Words{0, 1, 2, 3} + key;
  size_t i = 0;
  for (; i + 4 <= n; i += 4, keys += 4) {
    const Four<W> drawn = four_below_one<W>(keys);
    std::memcpy(out + i, &drawn, sizeof drawn);
  }
  const Four<W> drawn = four_below_one<W>(keys);
  std::memcpy(out + i, &drawn, (n - i) * sizeof(W));
}

// Codes of whole multiples of steps, rounded up where a random number is below the rest, in two's complement.
// Number i of x is number `place + i` of its row: of the chunk (place + i) / chunk, whose step is a power of two.
template <class W>
void quantise(const W* x, size_t n, uint64_t key, const W* steps, size_t chunk, size_t place, W most, unsigned mask,
              uint8_t* codes) {
  W drawn[BLOCK];
  while (n) {
    const size_t here = std::min({n, BLOCK, chunk - place % chunk});
    const W step = steps[place / chunk], inverse = 1 / step;
    uniform(drawn, key, here);
    // The quotient by a power of two is the product with its inverse, but where that overflows.
    const bool multiplies = std::isfinite(inverse);
    const W by = multiplies ? inverse : step;
    for (size_t i = 0; i < here; i++) {
      const W exact = multiplies ? x[i] * by : x[i] / by;
      const W low = std::floor(exact);
      const W multiple = low + W(drawn[i] < exact - low ? 1 : 0);
      codes[i] = uint8_t(unsigned(int(std::max(-most, std::min(multiple, most)))) & mask);
    }
    x += here, codes += here, key += here, place += here, n -= here;
  }
}

// The largest magnitude of each chunk of a row; NaN where a number is.
//
// Magnitudes have the order of their bits, in which a NaN comes last.
template <class W, class Bits>
void maxima(const Bits* x, size_t n, size_t chunk, W* out) {
  constexpr Bits MAGNITUDE = std::numeric_limits<Bits>::max();
  constexpr size_t LANES = 32 / sizeof(Bits);
  for (; n; out++) {
    const size_t here = std::min(n, chunk);
    Bits lanes[LANES] = {};
    size_t i = 0;
    for (; i + LANES <= here; i += LANES)
      for (size_t j = 0; j < LANES; j++) lanes[j] = std::max(lanes[j], x[i + j] & MAGNITUDE);
    for (; i < here; i++) lanes[0] = std::max(lanes[0], x[i] & MAGNITUDE);
    const Bits most = *std::max_element(lanes, lanes + LANES);
    std::memcpy(out, &most, sizeof most);
    x += here, n -= here;
  }
}

// out[i] = codes[i] times the step of its chunk.
template <class W>
void multiples(const int8_t* codes, size_t n, const W* steps, size_t chunk, size_t place, W* out) {
  while (n) {
    const size_t here = std::min(n, chunk - place % chunk);
    const W step = steps[place / chunk];
    for (size_t i = 0; i < here; i++) out[i] = W(codes[i]) * step;
    codes += here, out += here, place += here, n -= here;
  }
}

// Codes between the least and the greatest number of each row: round(x scale) - bottom, from 0 to 255.
template <class W>
void grid_codes(const W* x, size_t rows, size_t width, size_t stride, const W* scale, const W* bottom, uint8_t* codes) {
  for (size_t row = 0; row < rows; row++, x += stride, codes += stride) {
    const W by = scale[row], from = bottom[row];
    for (size_t i = 0; i < width; i++)
      codes[i] = uint8_t(int(std::max(W(0), std::min(std::nearbyint(x[i] * by) - from, W(255)))));
  }
}

template <class W>
void grid_numbers(const uint8_t* codes, size_t rows, size_t width, size_t stride, const W* scale, const W* bottom,
                  W* out) {
  for (size_t row = 0; row < rows; row++, codes += stride, out += width) {
    const W by = scale[row], from = bottom[row];
    for (size_t i = 0; i < width; i++) out[i] = (W(codes[i]) + from) / by;
  }
}

template <class W>
void signs(const W* x, size_t n, uint8_t* packed) {
  for (; n; packed++) {
    const size_t here = std::min(n, size_t(8));
    unsigned byte = 0;
    for (size_t i = 0; i < here; i++) byte |= unsigned(x[i] < 0) << i;
    *packed = uint8_t(byte);
    x += here, n -= here;
  }
}

// The lowest `bits` bits of each lane of `width` bits.
constexpr uint64_t lanes(unsigned width, unsigned bits) {
  uint64_t found = 0;
  for (unsigned at = 0; at < 64; at += width) found |= ((uint64_t(1) << bits) - 1) << at;
  return found;
}

// From lanes of `LANE` bits to lanes twice as wide, whose lower half had `HAVE` bits: the upper half closes up.
template <unsigned LANE, unsigned HAVE>
inline uint64_t closed(uint64_t eight) {
  constexpr uint64_t LOW = lanes(2 * LANE % 64 ? 2 * LANE : 64, HAVE);
  return (eight & LOW) | ((eight & (LOW << LANE)) >> (LANE - HAVE));
}
template <unsigned LANE, unsigned HAVE>
inline uint64_t opened(uint64_t eight) {
  constexpr uint64_t LOW = lanes(2 * LANE % 64 ? 2 * LANE : 64, HAVE);
  return (eight & LOW) | ((eight << (LANE - HAVE)) & (LOW << LANE));
}

// Eight codes of `BITS` bits in as many bytes, the first code in the lowest bits.
template <unsigned BITS>
void pack(const uint8_t* codes, size_t n, uint8_t* packed) {
  const auto close = [](uint64_t eight) {
    return closed<32, 4 * BITS>(closed<16, 2 * BITS>(closed<8, BITS>(eight)));
  };
  uint64_t eight = 0;
  for (; n >= 8; n -= 8, codes += 8, packed += BITS) {
    std::memcpy(&eight, codes, 8);
    eight = close(eight);
    std::memcpy(packed, &eight, BITS);
  }
  eight = 0;
  std::memcpy(&eight, codes, n);
  eight = close(eight);
  std::memcpy(packed, &eight, (n * BITS + 7) / 8);
}

template <unsigned BITS>
void unpack(const uint8_t* packed, size_t n, uint8_t* codes) {
  const auto open = [](uint64_t eight) {
    return opened<8, BITS>(opened<16, 2 * BITS>(opened<32, 4 * BITS>(eight)));
  };
  for (; n >= 8; n -= 8, codes += 8, packed += BITS) {
    uint64_t eight = 0;
    std::memcpy(&eight, packed, BITS);
    eight = open(eight);
    std::memcpy(codes, &eight, 8);
  }
  uint64_t eight = 0;
  std::memcpy(&eight, packed, (n * BITS + 7) / 8);
  eight = open(eight);
  std::memcpy(codes, &eight, n);
}

template <template <unsigned> class Kernel, class... Args>
int with_bits(unsigned bits, Args... args) {
  switch (bits) {
    case 1: return Kernel<1>::call(args...);
    case 2: return Kernel<2>::call(args...);
    case 3: return Kernel<3>::call(args...);
    case 4: return Kernel<4>::call(args...);
    case 5: return Kernel<5>::call(args...);
    case 6: return Kernel<6>::call(args...);
    case 7: return Kernel<7>::call(args...);
  }
  return 1;
}
template <unsigned BITS>
struct Pack {
  static int call(const uint8_t* codes, size_t n, uint8_t* packed) { return pack<BITS>(codes, n, packed), 0; }
};
template <unsigned BITS>
struct Unpack {
  static int call(const uint8_t* packed, size_t n, uint8_t* codes) { return unpack<BITS>(packed, n, codes), 0; }
};

#if defined(__x86_64__)
bool word_products() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
bool word_products() { return false; }
#endif
bool multiplies_words = word_products();

}  // namespace shoal

extern "C" {

// Whether 64-bit integers are multiplied by one instruction, if the CPU has it: for tests, which compare both ways.
// Returns whether they are.
int shoal_multiply_words(int wanted) {
  shoal::multiplies_words = wanted && shoal::word_products();
  return shoal::multiplies_words;
}

int shoal_uniform(int wide, void* out, uint64_t key, size_t n) {
  shoal::for_this_cpu([=] {
    if (wide)
      shoal::uniform(static_cast<double*>(out), key, n);
    else
      shoal::uniform(static_cast<float*>(out), key, n);
  });
  return 0;
}

int shoal_quantise(int wide, const void* x, size_t n, uint64_t key, const void* steps, size_t chunk, size_t place,
                   double most, unsigned mask, uint8_t* codes) {
  shoal::for_this_cpu([=] {
    if (wide)
      shoal::quantise(static_cast<const double*>(x), n, key, static_cast<const double*>(steps), chunk, place, most,
                      mask, codes);
    else
      shoal::quantise(static_cast<const float*>(x), n, key, static_cast<const float*>(steps), chunk, place,
                      float(most), mask, codes);
  });
  return 0;
}

int shoal_maxima(int wide, const void* x, size_t n, size_t chunk, void* out) {
  if (wide)
    shoal::maxima(static_cast<const int64_t*>(x), n, chunk, static_cast<double*>(out));
  else
    shoal::maxima(static_cast<const int32_t*>(x), n, chunk, static_cast<float*>(out));
  return 0;
}

int shoal_multiples(int wide, const int8_t* codes, size_t n, const void* steps, size_t chunk, size_t place, void* out) {
  if (wide)
    shoal::multiples(codes, n, static_cast<const double*>(steps), chunk, place, static_cast<double*>(out));
  else
    shoal::multiples(codes, n, static_cast<const float*>(steps), chunk, place, static_cast<float*>(out));
  return 0;
}

int shoal_grid_codes(const float* x, size_t rows, size_t width, size_t stride, const float* scale, const float* bottom,
                     uint8_t* codes) {
  shoal::grid_codes(x, rows, width, stride, scale, bottom, codes);
  return 0;
}

int shoal_grid_numbers(const uint8_t* codes, size_t rows, size_t width, size_t stride, const float* scale,
                       const float* bottom, float* out) {
  shoal::grid_numbers(codes, rows, width, stride, scale, bottom, out);
  return 0;
}

int shoal_signs(const float* x, size_t n, uint8_t* packed) {
  shoal::signs(x, n, packed);
  return 0;
}

int shoal_pack(unsigned bits, const uint8_t* codes, size_t n, uint8_t* packed) {
  return shoal::with_bits<shoal::Pack>(bits, codes, n, packed);
}

int shoal_unpack(unsigned bits, const uint8_t* packed, size_t n, uint8_t* codes) {
  return shoal::with_bits<shoal::Unpack>(bits, packed, n, codes);
}

}

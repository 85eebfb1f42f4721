// Weighted sums and reductions of many tensors, each number read once and written once.
//
// The order of operations is that of shoal/kernels/sums.py in torch, so the bits are the same.
#include "tiles.h"

namespace shoal {

enum Scale { NO_SCALE = 0, MULTIPLY = 1, DIVIDE = 2 };
enum How { SUM = 0, AVERAGE = 1, PRODUCT = 2, MINIMUM = 3, MAXIMUM = 4 };
enum Dtype { FLOAT32 = 0, FLOAT64 = 1, FLOAT16 = 2, BFLOAT16 = 3 };

// out = sum of weights[k] * in[k], one fused multiply-add for each term after the first; or, with a scale, the sum of
// in[k], multiplied or divided by `factor` once.
template <class T>
void weigh(const Result<T>& result, const T* const* in, int count, const double* weights, int scale, double factor) {
  using W = Wide<T>;
  with_count(count, [&](auto inputs) {
    if (scale == NO_SCALE) {
      W weight[MOST_INPUTS];
      for (int k = 0; k < inputs; k++) weight[k] = W(weights[k]);
      for_each_tile(result, in, inputs, [&](const T* const* at) {
        Tile<W> sum = load(at[0]) * weight[0];
        for (int k = 1; k < inputs; k++) sum = fma(load(at[k]), weight[k], sum);
        return sum;
      });
      return;
    }
    const W by = W(factor);
    for_each_tile(result, in, inputs, [=](const T* const* at) {
      Tile<W> sum = load(at[0]);
      for (int k = 1; k < inputs; k++) sum = sum + load(at[k]);
      return scale == DIVIDE ? sum / by : sum * by;
    });
  });
}

struct Add {
  template <class W>
  Tile<W> operator()(const Tile<W>& x, const Tile<W>& y) const {
    return x + y;
  }
};
struct Multiply {
  template <class W>
  Tile<W> operator()(const Tile<W>& x, const Tile<W>& y) const {
    return x * y;
  }
};
// A NaN wins, whichever operand it is. Of two zeros the second is taken, as the vector instructions do that torch uses.
struct Minimum {
  template <class V>
  static V least(V x, V y) {
    return x != x ? x : x < y ? x : y;
  }
  template <class W>
  Tile<W> operator()(const Tile<W>& x, const Tile<W>& y) const {
    return {least(x.a, y.a), least(x.b, y.b), least(x.c, y.c), least(x.d, y.d)};
  }
};
struct Maximum {
  template <class V>
  static V most(V x, V y) {
    return x != x ? x : x > y ? x : y;
  }
  template <class W>
  Tile<W> operator()(const Tile<W>& x, const Tile<W>& y) const {
    return {most(x.a, y.a), most(x.b, y.b), most(x.c, y.c), most(x.d, y.d)};
  }
};

// out = the reduction of in[0], in[1], ... in this order. An input whose bit in `starts` is set begins a part, which is
// reduced by itself first and then into the result.
template <class T, class Step>
void fold(const Result<T>& result, const T* const* in, int count, uint64_t starts, bool divides, Step step) {
  using W = Wide<T>;
  const W inputs = W(count);
  for_each_tile(result, in, count, [=](const T* const* at) {
    int k = 1;
    Tile<W> total = load(at[0]);
    for (; k < count && !(starts >> k & 1); k++) total = step(total, load(at[k]));
    while (k < count) {
      Tile<W> part = load(at[k++]);
      for (; k < count && !(starts >> k & 1); k++) part = step(part, load(at[k]));
      total = step(total, part);
    }
    return divides ? total / inputs : total;
  });
}

template <class T>
int reduce(const Result<T>& result, const T* const* in, int count, int how, uint64_t starts) {
  switch (how) {
    case SUM:
    case AVERAGE:
      fold(result, in, count, starts, how == AVERAGE, Add{});
      return 0;
    case PRODUCT:
      fold(result, in, count, starts, false, Multiply{});
      return 0;
    case MINIMUM:
      fold(result, in, count, starts, false, Minimum{});
      return 0;
    case MAXIMUM:
      fold(result, in, count, starts, false, Maximum{});
      return 0;
  }
  return 1;
}

// Call `kernel` with a null pointer of the type that `dtype` names. 1 where there is none.
template <class Kernel>
int with_type(int dtype, Kernel kernel) {
  switch (dtype) {
    case FLOAT32:
      return kernel(static_cast<float*>(nullptr));
    case FLOAT64:
      return kernel(static_cast<double*>(nullptr));
    case FLOAT16:
      return kernel(static_cast<Half*>(nullptr));
    case BFLOAT16:
      return kernel(static_cast<BFloat16*>(nullptr));
  }
  return 1;
}

}  // namespace shoal

extern "C" {

int shoal_weigh(int dtype, void* out, void* also, const void* const* in, int count, const double* weights, int scale,
                double factor, size_t length, int streams) {
  if (count < 1 || count > shoal::MOST_INPUTS) return 1;
  return shoal::with_type(dtype, [=](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const shoal::Result<T> result{static_cast<T*>(out), static_cast<T*>(also), length, streams != 0};
    shoal::weigh(result, reinterpret_cast<const T* const*>(in), count, weights, scale, factor);
    return 0;
  });
}

int shoal_copy(void* out, const void* in, size_t bytes) {
  shoal::copy_streaming(static_cast<char*>(out), static_cast<const char*>(in), bytes);
  return 0;
}

int shoal_reduce(int dtype, void* out, const void* const* in, int count, int how, uint64_t starts, size_t length,
                 int streams) {
  if (count < 1 || count > shoal::MOST_INPUTS) return 1;
  return shoal::with_type(dtype, [=](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const shoal::Result<T> result{static_cast<T*>(out), nullptr, length, streams != 0};
    return shoal::reduce(result, reinterpret_cast<const T* const*>(in), count, how, starts);
  });
}

}

#include "ops/gated_delta_net/cpu/vector/chunk.h"

namespace heddle::ops::gdn_cpu::HEDDLE_CPU_ARCH {
namespace {

template <class T>
struct ForwardScratch {
  Shared<T> shared[kChunks];
  T *S, *w, *u, *o, *tail_u;

  ForwardScratch(Arena& arena, const RuleArgs& a, long heads) {
    take_shared(arena, shared, a.K);
    S = arena.take<T>(heads * a.K * (a.V + kPad));
    w = arena.take<T>(C * a.V);
    u = arena.take<T>(C * a.V);
    o = arena.take<T>(C * a.V);
    tail_u = arena.take<T>(C * a.V);
  }
};

template <class X>
void forward(const RuleArgs& a, const RuleUnit& unit, void* memory) {
  using T = Compute<X>;
  Arena arena{static_cast<char*>(memory)};
  const ForwardScratch<T> f(arena, a, unit.heads);
  const long K = a.K, V = a.V, ld = V + kPad, state_size = K * ld;
  const long begin = a.cu_seqlens[unit.sequence], end = a.cu_seqlens[unit.sequence + 1];
  for (long h = 0; h < unit.heads; ++h) {
    T* S = f.S + h * state_size;
    if (a.initial != nullptr) {
      copy_state(
          S, ld,
          static_cast<const T*>(a.initial) + (unit.sequence * a.Hv + unit.first_head + h) * K * V,
          V, K, V);
    } else {
      zero(S, state_size);
    }
  }
  long segment = a.first_segment[unit.sequence];
  for (long first = begin; first < end; first += kSegment, ++segment) {
    const long last = first + kSegment < end ? first + kSegment : end;
    for (long token = first, c = 0; token < last; token += C, ++c) {
      prepare<X>(a, unit, token, last - token < C ? last - token : C, f.shared[c]);
    }
    for (long h = 0; h < unit.heads; ++h) {
      const long head = unit.first_head + h;
      T* S = f.S + h * state_size;
      if (a.states != nullptr) {
        copy_state(static_cast<T*>(a.states) + (segment * a.Hv + head) * K * V, V, S, ld, K, V);
      }
      for (long token = first, c = 0; token < last; token += C, ++c) {
        const Shared<T>& s = f.shared[c];
        const long n = last - token < C ? last - token : C;
        Gates<T> x;
        fill_gates(a, head, token, n, s, x);
        load_rows(f.w, static_cast<const X*>(a.v) + token * a.v_stride + head * V, a.v_stride, n,
                  V);
        // Q S and W = V - e^G K S in one pass over the state.
        product(2 * C, V, K, Columns<T>{s.qkT, 2 * C}, S, ld, Zero<T>{},
                [&](long i, long j, Vec<T> v) {
                  if (i < C) {
                    store(f.o + i * V + j, x.grow[i] * v);
                  } else {
                    T* w = f.w + (i - C) * V + j;
                    store(w, load(w) - x.grow[i - C] * v);
                  }
                });
        solve(x, f.w, f.u, V);
        X* o = static_cast<X*>(a.o) + (token * a.Hv + head) * V;
        product(
            C, V, C, Rows<T>{x.P, C}, f.u, V, [&](long i, long j) { return load(f.o + i * V + j); },
            [&](long i, long j, Vec<T> v) {
              if (i < n) store(o + i * a.Hv * V + j, v);
            });
        advance(x, s.qk_rows + C * K, f.u, f.tail_u, S, S, K, V);
        if (a.error != nullptr) {
          copy(static_cast<T*>(a.error) + (head * a.T + token) * V, f.w, n * V);
        }
      }
    }
  }
  if (a.final == nullptr) return;
  for (long h = 0; h < unit.heads; ++h) {
    copy_state(static_cast<T*>(a.final) + (unit.sequence * a.Hv + unit.first_head + h) * K * V, V,
               f.S + h * state_size, ld, K, V);
  }
}

unsigned long forward_bytes(const RuleArgs& a, long heads) {
  Arena arena{nullptr};
  ForwardScratch<double>(arena, a, heads);
  return arena.used;
}

}  // namespace

void fill_forward(RuleKernels& kernels) {
  kernels.forward_bytes = forward_bytes;
  kernels.forward[0] = forward<float>;
  kernels.forward[1] = forward<simd::BFloat16>;
  kernels.forward[2] = forward<double>;
}

}  // namespace heddle::ops::gdn_cpu::HEDDLE_CPU_ARCH

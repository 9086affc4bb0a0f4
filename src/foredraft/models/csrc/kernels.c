/* CPU kernels of the decoder: matrix times packed weights, paged attention, and the small operations between.
 *
 * One property decides how everything here is written: a row's result has the same bits whatever other rows are in the
 * call, and whichever thread computes it. Every sum runs over its terms in one fixed order in one accumulator per
 * output, so that verifying eight tokens gives the very logits that eight single steps would have given.
 *
 * Activations are float32. Weights and KV cache are float32 or bfloat16 (widened exactly, used in float32).
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#include "scratch.h"

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
#define NR 16              /* outputs in a weight panel, keys in a score block */
#define NV (NR / LANES)    /* vectors in a panel row */
#define SMALL 100000       /* multiplications that one thread does sooner than several */
#define MR_MAX 6           /* rows that one pass over a panel serves: 12 accumulators of 16 registers */

typedef float vf __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint16_t bf16;

static inline vf splat(float x) {
#if LANES == 16
    return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#else
    return (vf){x, x, x, x, x, x, x, x};
#endif
}

static inline vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

static inline float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static inline bf16 narrow(float x) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

/* ---- weights ------------------------------------------------------------------------------------------------- */

/* Packed weights: panels of NR outputs, K rows each. A float32 panel row holds outputs 0..15. A bfloat16 one holds
 * 2 * LANES outputs as LANES words, so that a mask and a shift widen it: word j has output j below and j + LANES above
 * (with 16 lanes, one word vector covers two panel rows k, k + 1 of 16 outputs; see fd_pack_bf16). */

static inline void weights_f32(const float *w, int k, vf *out) {
    for (int v = 0; v < NV; v++) out[v] = *(const vf *)(w + (size_t)k * NR + v * LANES);
}

static inline void weights_bf16(const bf16 *w, int k, vf *out) {
#if LANES == 16
    vu wide = __builtin_convertvector(*(const vh *)(w + (size_t)k * NR), vu);
    out[0] = (vf)(wide << 16);
#else
    vu pair = *(const vu *)(w + (size_t)k * NR);
    out[0] = (vf)(pair << 16);
    out[1] = (vf)(pair & 0xffff0000u);
#endif
}

/* MR rows times one panel. `x` holds the rows interleaved, MR values for each k. While it computes it fetches
 * `step` bytes per k of the next panel, so that memory never waits for arithmetic nor arithmetic for memory. */
#define PANEL(MR, T, LOAD)                                                                                             \
    static inline __attribute__((always_inline)) void panel_##LOAD##_##MR(                                             \
        const T *restrict w, const float *restrict x, int K, const char *next, int step, float *restrict out) {       \
        vf acc[MR][NV];                                                                                                \
        for (int i = 0; i < MR; i++)                                                                                   \
            for (int v = 0; v < NV; v++) acc[i][v] = splat(0.0f);                                                      \
        for (int k = 0; k < K; k++) {                                                                                  \
            vf row[NV];                                                                                                \
            LOAD(w, k, row);                                                                                           \
            __builtin_prefetch(next, 0, 3);                                                                            \
            next += step;                                                                                              \
            for (int i = 0; i < MR; i++) {                                                                             \
                vf xi = splat(x[i]);                                                                                   \
                for (int v = 0; v < NV; v++) acc[i][v] += xi * row[v];                                                 \
            }                                                                                                          \
            x += MR;                                                                                                   \
        }                                                                                                              \
        for (int i = 0; i < MR; i++)                                                                                   \
            for (int v = 0; v < NV; v++) *(vf *)(out + i * NR + v * LANES) = acc[i][v];                                \
    }
#define PANELS(T, LOAD) PANEL(1, T, LOAD) PANEL(2, T, LOAD) PANEL(3, T, LOAD) PANEL(4, T, LOAD) PANEL(5, T, LOAD) PANEL(6, T, LOAD)
PANELS(float, weights_f32)
PANELS(bf16, weights_bf16)

/* Rows of the next pass: full passes of 6, and what is left in equal parts. */
static inline int pass_rows(int left) {
    return left >= 2 * MR_MAX ? MR_MAX : left > MR_MAX ? (left + 1) / 2 : left;
}

static void pack_rows(const float *x, int64_t stride, int rows, int K, float *out) {
    for (int k = 0; k < K; k++)
        for (int i = 0; i < rows; i++) out[(size_t)k * rows + i] = x[i * stride + k];
}

/* y = x wT + bias + residual.
 * x [M, K] with row stride xs, y and residual [M, N] contiguous; bias and residual may be null. */
#define GEMM(NAME, T, LOAD)                                                                                            \
    void NAME(const T *w, const float *bias, const float *x, int64_t xs, const float *residual, float *y, int M,      \
              int N, int K, int threads) {                                                                             \
        int panels = (N + NR - 1) / NR;                                                                                \
        if ((int64_t)M * N * K < SMALL) threads = 1; /* waking a thread takes longer than the work */                  \
        /* rows whose packed form stays in half a 512 KB L2 while all panels pass by */                                \
        int chunk = 65536 / K / MR_MAX * MR_MAX;                                                                       \
        if (chunk < 2 * MR_MAX) chunk = 2 * MR_MAX;                                                                    \
        float *packed = scratch(((size_t)(M < chunk ? M : chunk) * K + 16) * sizeof *packed);                          \
        for (int m0 = 0; m0 < M; m0 += chunk) {                                                                        \
            int rows = M - m0 < chunk ? M - m0 : chunk;                                                                \
            int passes = 0;                                                                                            \
            for (int m = 0; m < rows; m += pass_rows(rows - m)) {                                                      \
                pack_rows(x + (m0 + m) * xs, xs, pass_rows(rows - m), K, packed + (size_t)m * K);                      \
                passes++;                                                                                              \
            }                                                                                                          \
            int step = (int)sizeof(T) * NR / passes;                                                                   \
            _Pragma("omp parallel num_threads(threads)") {                                                             \
                int thread = omp_get_thread_num(), team = omp_get_num_threads();                                       \
                int first = (int)((int64_t)panels * thread / team), last = (int)((int64_t)panels * (thread + 1) / team); \
                float out[MR_MAX * NR];                                                                                \
                for (int p = first; p < last; p++) {                                                                   \
                    const T *panel = w + (size_t)p * K * NR;                                                           \
                    const char *next = (const char *)(panel + (size_t)K * NR);                                         \
                    int columns = N - p * NR < NR ? N - p * NR : NR;                                                   \
                    for (int m = 0; m < rows;) {                                                                       \
                        int count = pass_rows(rows - m);                                                               \
                        const float *xm = packed + (size_t)m * K;                                                      \
                        switch (count) {                                                                               \
                        case 1: panel_##LOAD##_1(panel, xm, K, next, step, out); break;                                \
                        case 2: panel_##LOAD##_2(panel, xm, K, next, step, out); break;                                \
                        case 3: panel_##LOAD##_3(panel, xm, K, next, step, out); break;                                \
                        case 4: panel_##LOAD##_4(panel, xm, K, next, step, out); break;                                \
                        case 5: panel_##LOAD##_5(panel, xm, K, next, step, out); break;                                \
                        default: panel_##LOAD##_6(panel, xm, K, next, step, out); break;                               \
                        }                                                                                              \
                        next += (size_t)K * step;                                                                      \
                        for (int i = 0; i < count; i++) {                                                              \
                            size_t at = (size_t)(m0 + m + i) * N + (size_t)p * NR;                                     \
                            for (int n = 0; n < columns; n++) {                                                        \
                                float value = out[i * NR + n];                                                         \
                                if (bias) value += bias[p * NR + n];                                                   \
                                if (residual) value += residual[at + n];                                               \
                                y[at + n] = value;                                                                     \
                            }                                                                                          \
                        }                                                                                              \
                        m += count;                                                                                    \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }
GEMM(fd_gemm_f32, float, weights_f32)
GEMM(fd_gemm_bf16, bf16, weights_bf16)

/* Where output n, input k of a matrix with K inputs lies in its packed form. */
static inline size_t at_f32(int n, int k, int K) { return ((size_t)(n / NR) * K + k) * NR + n % NR; }
static inline size_t at_bf16(int n, int k, int K) {
    int j = n % NR;
#if LANES == 16
    int word = j;
#else
    int word = (j % LANES) * 2 + j / LANES;
#endif
    return ((size_t)(n / NR) * K + k) * NR + word;
}

int64_t fd_packed_size(int N, int K) { return (int64_t)((N + NR - 1) / NR) * NR * K; }

/* Packs w [N, K]; `out` has fd_packed_size elements, zero where a panel is not full. */
void fd_pack_f32(const float *w, float *out, int N, int K) {
    _Pragma("omp parallel for") for (int n = 0; n < N; n++)
        for (int k = 0; k < K; k++) out[at_f32(n, k, K)] = w[(size_t)n * K + k];
}
void fd_pack_bf16(const bf16 *w, bf16 *out, int N, int K) {
    _Pragma("omp parallel for") for (int n = 0; n < N; n++)
        for (int k = 0; k < K; k++) out[at_bf16(n, k, K)] = w[(size_t)n * K + k];
}

/* Rows `ids` of the packed matrix as float32 [count, K]. */
void fd_rows_f32(const float *w, const int64_t *ids, float *out, int count, int K) {
    for (int i = 0; i < count; i++)
        for (int k = 0; k < K; k++) out[(size_t)i * K + k] = w[at_f32((int)ids[i], k, K)];
}
void fd_rows_bf16(const bf16 *w, const int64_t *ids, float *out, int count, int K) {
    for (int i = 0; i < count; i++)
        for (int k = 0; k < K; k++) out[(size_t)i * K + k] = widen(w[at_bf16((int)ids[i], k, K)]);
}

/* ---- between the matrices -------------------------------------------------------------------------------------- */

static inline float lane_sum(vf x) { /* pairwise, always the same tree */
    float part[LANES];
    memcpy(part, &x, sizeof part);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}

/* y = x / rms(x) * weight over the last dimension; `rows` vectors of `size`. Element (r, h) of an outer [R, H] grid of
 * vectors starts at x + r * stride + h * size, H = heads. */
void fd_rms_norm(const float *x, int64_t stride, const float *weight, float *y, int R, int heads, int size, float eps,
                 int threads) {
    _Pragma("omp parallel for num_threads(threads) if (R * heads > 32)") for (int row = 0; row < R * heads; row++) {
        const float *in = x + (row / heads) * stride + (int64_t)(row % heads) * size;
        float *out = y + (size_t)row * size;
        vf total = splat(0.0f);
        int i = 0;
        for (; i + LANES <= size; i += LANES) {
            vf part = *(const vf *)(in + i);
            total += part * part;
        }
        float sum = lane_sum(total);
        for (; i < size; i++) sum += in[i] * in[i];
        float scale = 1.0f / sqrtf(sum / (float)size + eps);
        for (int j = 0; j < size; j++) out[j] = in[j] * scale * weight[j];
    }
}

/* exp for float32, to about 1e-7 relative; -inf gives 0, NaN stays NaN. Cephes' polynomial. */
static inline vf vexp(vf x) {
    vf low = splat(-87.33654f), high = splat(88.37626f);
    vf clamped = pick(x < low, low, pick(x > high, high, x));
    vf n = clamped * splat(1.44269504f);
    vi whole = __builtin_convertvector(n + pick(n < splat(0.0f), splat(-0.5f), splat(0.5f)), vi);
    vf base = __builtin_convertvector(whole, vf);
    vf r = clamped - base * splat(0.693359375f);
    r = r - base * splat(-2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    vf y = p * (vf)((whole + 127) << 23);
    y = pick(x < low, splat(0.0f), y);
    return pick(x != x, x, y);
}

/* silu(gate) * up of [M, 2 I], gate first. */
void fd_silu_mul(const float *gate_up, float *y, int M, int I, int threads) {
    _Pragma("omp parallel for num_threads(threads) if (M > 4)") for (int m = 0; m < M; m++) {
        const float *gate = gate_up + (size_t)m * 2 * I, *up = gate + I;
        float *out = y + (size_t)m * I;
        int i = 0;
        for (; i + LANES <= I; i += LANES) {
            vf g = *(const vf *)(gate + i);
            *(vf *)(out + i) = g / (splat(1.0f) + vexp(-g)) * *(const vf *)(up + i);
        }
        if (i < I) { /* the same arithmetic on a padded vector */
            float g[LANES] = {0}, u[LANES] = {0}, o[LANES];
            memcpy(g, gate + i, (I - i) * 4);
            memcpy(u, up + i, (I - i) * 4);
            *(vf *)o = *(vf *)g / (splat(1.0f) + vexp(-*(vf *)g)) * *(vf *)u;
            memcpy(out + i, o, (I - i) * 4);
        }
    }
}

/* Rotates in place the first 2 * half dimensions of each of `heads` vectors of `size` in each row. */
void fd_rope(float *x, int64_t stride, const float *cosines, const float *sines, int M, int heads, int size, int half) {
    for (int m = 0; m < M; m++) {
        const float *c = cosines + (size_t)m * half, *s = sines + (size_t)m * half;
        for (int h = 0; h < heads; h++) {
            float *first = x + m * stride + (int64_t)h * size, *second = first + half;
            for (int i = 0; i < half; i++) {
                float a = first[i], b = second[i];
                first[i] = a * c[i] - b * s[i];
                second[i] = b * c[i] + a * s[i];
            }
        }
    }
}

/* ---- attention over the paged cache ------------------------------------------------------------------------------ */

/* A layer's cache: keys [blocks, kv_heads, dim, block], so that scores of neighbouring keys are one vector; values
 * [blocks, kv_heads, block, dim], so that an output is. */

typedef struct {
    const int64_t *query_start; /* [requests + 1] */
    const int64_t *seq_lens;    /* [requests], this query included */
    const int64_t *tables;      /* [requests, table_stride] */
    const int64_t *positions;   /* [tokens] */
    const int64_t *slots;       /* [tokens], -1: not stored */
    const uint8_t *tree;        /* [tokens, tree_stride] or null */
    int64_t table_stride, tree_stride;
    int32_t requests, tokens, heads, kv_heads, dim, block, threads, window; /* window 0: none */
    float scale;
} Batch;

#define GROUP 8 /* query rows that share one pass over the keys */

static inline vf load_f32(const float *p) { return *(const vf *)p; }
static inline vf load_bf16(const bf16 *p) { return (vf)(__builtin_convertvector(*(const vh *)p, vu) << 16); }
static inline float get_f32(const float *p) { return *p; }
static inline float get_bf16(const bf16 *p) { return widen(*p); }
static inline void put_f32(float *p, float x) { *p = x; }
static inline void put_bf16(bf16 *p, float x) { *p = narrow(x); }

/* Sums of single floats say fmaf outright: a compiler may turn such a loop into vector products that are added one by
 * one, with a rounding more than the products it fuses elsewhere, and so make a row's bits depend on the loop's length. */

/* Scores of ROWS queries (interleaved in q) with the keys of one block; row i's go to out + i * stride. */
#define SCORES(ROWS, T, KIND)                                                                                          \
    static inline __attribute__((always_inline)) void scores_##KIND##_##ROWS(                                          \
        const T *restrict keys, const float *restrict q, int dim, int block, float scale, float *restrict out,        \
        size_t stride) {                                                                                               \
        int j = 0;                                                                                                     \
        for (; j + LANES <= block; j += LANES) {                                                                       \
            vf acc[ROWS];                                                                                              \
            for (int i = 0; i < ROWS; i++) acc[i] = splat(0.0f);                                                       \
            for (int d = 0; d < dim; d++) {                                                                            \
                vf key = load_##KIND(keys + (size_t)d * block + j);                                                    \
                for (int i = 0; i < ROWS; i++) acc[i] += splat(q[d * ROWS + i]) * key;                                 \
            }                                                                                                          \
            for (int i = 0; i < ROWS; i++) *(vf *)(out + i * stride + j) = acc[i] * splat(scale);                      \
        }                                                                                                              \
        for (; j < block; j++)                                                                                         \
            for (int i = 0; i < ROWS; i++) {                                                                           \
                float acc = 0.0f;                                                                                      \
                for (int d = 0; d < dim; d++)                                                                          \
                    acc = __builtin_fmaf(q[d * ROWS + i], get_##KIND(keys + (size_t)d * block + j), acc);              \
                out[i * stride + j] = acc * scale;                                                                     \
            }                                                                                                          \
    }

/* Adds, for ROWS queries, probability times value over `count` keys of one block to out [ROWS, dim]. */
#define MIX(ROWS, T, KIND)                                                                                             \
    static inline __attribute__((always_inline)) void mix_##KIND##_##ROWS(                                             \
        const T *restrict values, const float *restrict p, size_t stride, int count, int dim, float *restrict out,    \
        int64_t out_stride) {                                                                                          \
        int d = 0;                                                                                                     \
        for (; d + LANES <= dim; d += LANES) {                                                                         \
            vf acc[ROWS];                                                                                              \
            for (int i = 0; i < ROWS; i++) acc[i] = *(const vf *)(out + i * out_stride + d);                           \
            for (int j = 0; j < count; j++) {                                                                          \
                vf value = load_##KIND(values + (size_t)j * dim + d);                                                  \
                for (int i = 0; i < ROWS; i++) acc[i] += splat(p[i * stride + j]) * value;                             \
            }                                                                                                          \
            for (int i = 0; i < ROWS; i++) *(vf *)(out + i * out_stride + d) = acc[i];                                 \
        }                                                                                                              \
        for (; d < dim; d++)                                                                                           \
            for (int i = 0; i < ROWS; i++) {                                                                           \
                float acc = out[i * out_stride + d];                                                                   \
                for (int j = 0; j < count; j++)                                                                        \
                    acc = __builtin_fmaf(p[i * stride + j], get_##KIND(values + (size_t)j * dim + d), acc);            \
                out[i * out_stride + d] = acc;                                                                         \
            }                                                                                                          \
    }
#define EACH_ROWS(F, T, KIND) F(1, T, KIND) F(2, T, KIND) F(3, T, KIND) F(4, T, KIND) F(5, T, KIND) F(6, T, KIND) F(7, T, KIND) F(8, T, KIND)
EACH_ROWS(SCORES, float, f32)
EACH_ROWS(SCORES, bf16, bf16)
EACH_ROWS(MIX, float, f32)
EACH_ROWS(MIX, bf16, bf16)

#define BY_ROWS(NAME, KIND, rows, ...)                                                                                 \
    switch (rows) {                                                                                                    \
    case 1: NAME##_##KIND##_1(__VA_ARGS__); break;                                                                     \
    case 2: NAME##_##KIND##_2(__VA_ARGS__); break;                                                                     \
    case 3: NAME##_##KIND##_3(__VA_ARGS__); break;                                                                     \
    case 4: NAME##_##KIND##_4(__VA_ARGS__); break;                                                                     \
    case 5: NAME##_##KIND##_5(__VA_ARGS__); break;                                                                     \
    case 6: NAME##_##KIND##_6(__VA_ARGS__); break;                                                                     \
    case 7: NAME##_##KIND##_7(__VA_ARGS__); break;                                                                     \
    default: NAME##_##KIND##_8(__VA_ARGS__); break;                                                                    \
    }

/* Scores [first, end) to exp(score - max), zero elsewhere in the vectors they touch; returns the sum. Lanes follow the
 * key's index, so the sum's order depends on nothing else. */
static float softmax_terms(float *s, int first, int end) {
    int low = first / LANES * LANES, high = (end + LANES - 1) / LANES * LANES;
    for (int j = low; j < first; j++) s[j] = -INFINITY;
    for (int j = end; j < high; j++) s[j] = -INFINITY;
    vf most = splat(-INFINITY);
    for (int j = low; j < high; j += LANES) {
        vf x = *(vf *)(s + j);
        most = pick(x > most, x, most);
    }
    float part[LANES], max;
    memcpy(part, &most, sizeof part);
    max = part[0];
    for (int i = 1; i < LANES; i++) max = part[i] > max ? part[i] : max;
    vf total = splat(0.0f);
    for (int j = low; j < high; j += LANES) {
        vf e = vexp(*(vf *)(s + j) - splat(max));
        *(vf *)(s + j) = e;
        total += e;
    }
    return lane_sum(total);
}

#define ATTENTION(NAME, T, KIND)                                                                                       \
    static void store_##KIND(const Batch *b, const float *k, int64_t ks, const float *v, int64_t vs, T *keys,         \
                             T *values) {                                                                              \
        int dim = b->dim, block = b->block;                                                                            \
        _Pragma("omp parallel for num_threads(b->threads) if (b->tokens > 16)") for (int t = 0; t < b->tokens; t++) {  \
            int64_t slot = b->slots[t];                                                                                \
            if (slot < 0) continue;                                                                                    \
            int64_t at = slot / block * b->kv_heads, offset = slot % block;                                            \
            for (int h = 0; h < b->kv_heads; h++) {                                                                    \
                T *key = keys + (at + h) * dim * block + offset, *value = values + ((at + h) * block + offset) * dim;  \
                const float *kt = k + t * ks + (int64_t)h * dim, *vt = v + t * vs + (int64_t)h * dim;                  \
                for (int d = 0; d < dim; d++) put_##KIND(key + (size_t)d * block, kt[d]);                              \
                for (int d = 0; d < dim; d++) put_##KIND(value + d, vt[d]);                                            \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    /* Rows [row, row + rows) of request r and kv head h; row i is query token i / G, head h * G + i % G. */           \
    static void group_##KIND(const Batch *b, int r, int h, int row, int rows, const float *q, int64_t qs,             \
                             const T *keys, const T *values, float *out) {                                             \
        int dim = b->dim, block = b->block, G = b->heads / b->kv_heads;                                                \
        int begin = (int)b->query_start[r], count = (int)b->query_start[r + 1] - begin;                                \
        int length = (int)b->seq_lens[r], prefix = length - count;                                                     \
        const int64_t *table = b->tables + r * b->table_stride;                                                        \
        size_t stride = ((size_t)(length + block - 1) / block + 1) * block + 2 * LANES;                                \
        float *buffer = scratch(GROUP * (stride + dim + LANES) * sizeof *buffer);                                      \
        float *packed = buffer + GROUP * stride;                                                                       \
        int first[GROUP], end[GROUP], lowest = length, highest = 0, common_first = 0, common_end = length;             \
        for (int i = 0; i < rows; i++) {                                                                               \
            int local = (row + i) / G, token = begin + local;                                                          \
            const float *qi = q + token * qs + (int64_t)(h * G + (row + i) % G) * dim;                                 \
            for (int d = 0; d < dim; d++) packed[d * rows + i] = qi[d];                                                \
            int64_t earliest = b->window > 0 ? b->positions[token] - b->window + 1 : 0;                                \
            first[i] = earliest > 0 ? (int)earliest : 0;                                                               \
            end[i] = b->tree ? length : prefix + local + 1;                                                            \
            if (b->tree && first[i] > prefix) first[i] = prefix;                                                       \
            if (first[i] < lowest) lowest = first[i];                                                                  \
            if (end[i] > highest) highest = end[i];                                                                    \
            if (first[i] > common_first) common_first = first[i];                                                      \
            if (end[i] < common_end) common_end = end[i];                                                              \
        }                                                                                                              \
        for (int j = lowest / block; j * block < highest; j++) {                                                       \
            const T *at = keys + ((int64_t)table[j] * b->kv_heads + h) * dim * block;                                  \
            BY_ROWS(scores, KIND, rows, at, packed, dim, block, b->scale, buffer + (size_t)j * block, stride)          \
        }                                                                                                              \
        if (b->tree) common_end = prefix;                                                                              \
        float *outs[GROUP];                                                                                            \
        float sums[GROUP];                                                                                             \
        int64_t mixed_stride = dim;                                                                                    \
        float *mixed = packed; /* the queries are used up */                                                           \
        for (int i = 0; i < rows; i++) {                                                                               \
            int local = (row + i) / G, token = begin + local;                                                          \
            float *s = buffer + (size_t)i * stride;                                                                    \
            if (b->tree) { /* what a row sees of its own query moves together, as if it were a chain */                \
                int n = prefix;                                                                                        \
                for (int j = 0; j < count; j++)                                                                        \
                    if (b->tree[token * b->tree_stride + j] &&                                                         \
                        (b->window <= 0 || b->positions[token] - b->positions[begin + j] < b->window))                 \
                        s[n++] = s[prefix + j];                                                                        \
                end[i] = n;                                                                                            \
            }                                                                                                          \
            sums[i] = softmax_terms(s, first[i], end[i]);                                                              \
            outs[i] = out + (size_t)token * b->heads * dim + (size_t)(h * G + (row + i) % G) * dim;                    \
            float *m = mixed + i * mixed_stride;                                                                       \
            for (int d = 0; d < dim; d++) m[d] = 0.0f;                                                                 \
            for (int j = first[i]; j < common_first && j < end[i]; j++) {                                              \
                const T *value = values + (((int64_t)table[j / block] * b->kv_heads + h) * block + j % block) * dim;   \
                mix_##KIND##_1(value, s + j, stride, 1, dim, m, mixed_stride);                                         \
            }                                                                                                          \
        }                                                                                                              \
        for (int j = common_first; j < common_end;) {                                                                  \
            int n = block - j % block;                                                                                 \
            if (n > common_end - j) n = common_end - j;                                                                \
            const T *at = values + (((int64_t)table[j / block] * b->kv_heads + h) * block + j % block) * dim;          \
            BY_ROWS(mix, KIND, rows, at, buffer + j, stride, n, dim, mixed, mixed_stride)                              \
            j += n;                                                                                                    \
        }                                                                                                              \
        for (int i = 0; i < rows; i++) {                                                                               \
            int token = begin + (row + i) / G;                                                                         \
            float *s = buffer + (size_t)i * stride, *m = mixed + i * mixed_stride;                                     \
            int at = common_end > common_first ? common_end : common_first, seen = at;                                 \
            if (b->tree) {                                                                                             \
                seen = prefix;                                                                                         \
                for (int j = 0; j < count; j++) {                                                                      \
                    if (!b->tree[token * b->tree_stride + j] ||                                                        \
                        (b->window > 0 && b->positions[token] - b->positions[begin + j] >= b->window))                 \
                        continue;                                                                                      \
                    int key = prefix + j;                                                                              \
                    const T *value =                                                                                   \
                        values + (((int64_t)table[key / block] * b->kv_heads + h) * block + key % block) * dim;        \
                    mix_##KIND##_1(value, s + seen++, stride, 1, dim, m, mixed_stride);                                \
                }                                                                                                      \
            } else {                                                                                                   \
                for (int j = at; j < end[i]; j++) {                                                                    \
                    const T *value =                                                                                   \
                        values + (((int64_t)table[j / block] * b->kv_heads + h) * block + j % block) * dim;            \
                    mix_##KIND##_1(value, s + j, stride, 1, dim, m, mixed_stride);                                     \
                }                                                                                                      \
            }                                                                                                          \
            float inverse = 1.0f / sums[i];                                                                            \
            for (int d = 0; d < dim; d++) outs[i][d] = m[d] * inverse;                                                 \
        }                                                                                                              \
    }                                                                                                                  \
    void NAME(const Batch *b, const float *q, int64_t qs, const float *k, int64_t ks, const float *v, int64_t vs,     \
              T *keys, T *values, float *out) {                                                                        \
        store_##KIND(b, k, ks, v, vs, keys, values);                                                                   \
        int G = b->heads / b->kv_heads;                                                                                \
        int64_t work = 0;                                                                                              \
        for (int r = 0; r < b->requests; r++)                                                                          \
            work += (b->query_start[r + 1] - b->query_start[r]) * b->seq_lens[r] * b->heads * b->dim * 2;              \
        int threads = work < SMALL ? 1 : b->threads;                                                                   \
        int64_t all_rows = (int64_t)b->tokens * b->heads;                                                              \
        int size = (int)(all_rows / (4 * threads));    /* enough tasks to keep every thread busy */                    \
        size = size < 1 ? 1 : size > GROUP ? GROUP : size;                                                             \
        int tasks = 0;                                                                                                 \
        for (int r = 0; r < b->requests; r++) {                                                                        \
            int rows = (int)(b->query_start[r + 1] - b->query_start[r]) * G;                                           \
            tasks += (rows + size - 1) / size * b->kv_heads;                                                           \
        }                                                                                                              \
        _Pragma("omp parallel for schedule(dynamic) num_threads(threads)   ") for (int task = 0; task < tasks;        \
                                                                                   task++) {                           \
            int left = task, r = 0, groups, rows;                                                                      \
            for (;; r++) {                                                                                             \
                rows = (int)(b->query_start[r + 1] - b->query_start[r]) * G;                                           \
                groups = (rows + size - 1) / size;                                                                     \
                if (left < groups * b->kv_heads) break;                                                                \
                left -= groups * b->kv_heads;                                                                          \
            }                                                                                                          \
            int row = left / b->kv_heads * size, take = rows - row < size ? rows - row : size;                         \
            group_##KIND(b, r, left % b->kv_heads, row, take, q, qs, keys, values, out);                               \
        }                                                                                                              \
    }
ATTENTION(fd_attention_f32, float, f32)
ATTENTION(fd_attention_bf16, bf16, bf16)

int fd_lanes(void) { return LANES; }

/* Matrix times packed bfloat16 weights on Intel's tile unit (AMX), which multiplies 16 rows in the time of one.
 *
 * Activations are rounded to bfloat16 on the way in; sums are float32, over the inputs in one fixed order for every
 * output, so a row's result has the same bits in any company, as in kernels.c. With up to 16 rows the weights' way from
 * memory is all that a product costs.
 */
#if defined(__x86_64__) && defined(__linux__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16")
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "scratch.h"

#define NR 16          /* outputs in a panel */
#define KC 32          /* inputs in a tile */
#define TILE (NR * KC) /* weights in a tile: pairs of inputs, [KC / 2][NR][2] */
#define SMALL 200000   /* multiplications that one thread does sooner than several */
#define AHEAD 8        /* tiles that are fetched ahead */

typedef uint16_t bf16;

#define XTILEDATA 18
#define ARCH_REQ_XCOMP_PERM 0x1023

/* Whether this process may use the tile unit; asks the kernel for it. */
int fd_amx_available(void) {
    __builtin_cpu_init();
    unsigned a, b, c, d;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    if (!(d & (1u << 22)) || !(d & (1u << 24))) return 0; /* amx_bf16, amx_tile */
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(1));
    if (!(a & (1u << 5))) return 0; /* avx512_bf16 */
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

static inline int tiles_of(int K) { return (K + KC - 1) / KC; }

int64_t fd_packed_size_amx(int N, int K) { return (int64_t)((N + NR - 1) / NR) * tiles_of(K) * TILE; }

/* Where output n, input k lies. */
static inline size_t at(int n, int k, int K) {
    return ((size_t)(n / NR) * tiles_of(K) + k / KC) * TILE + (size_t)(k % KC / 2) * 2 * NR + n % NR * 2 + k % 2;
}

/* Packs w [N, K]; `out` has fd_packed_size_amx elements and is zeroed here. */
void fd_pack_amx(const bf16 *w, bf16 *out, int N, int K) {
    memset(out, 0, (size_t)fd_packed_size_amx(N, K) * sizeof *out);
    _Pragma("omp parallel for") for (int n = 0; n < N; n++)
        for (int k = 0; k < K; k++) out[at(n, k, K)] = w[(size_t)n * K + k];
}

/* Rows `ids` of the packed matrix as float32 [count, K]. */
void fd_rows_amx(const bf16 *w, const int64_t *ids, float *out, int count, int K) {
    for (int i = 0; i < count; i++)
        for (int k = 0; k < K; k++) {
            uint32_t bits = (uint32_t)w[at((int)ids[i], k, K)] << 16;
            memcpy(out + (size_t)i * K + k, &bits, 4);
        }
}

static void narrow_row(const float *x, bf16 *out, int K) {
    int k = 0;
    for (; k + 16 <= K; k += 16) _mm256_storeu_si256((__m256i *)(out + k), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + k)));
    if (k < K) {
        __mmask16 mask = (__mmask16)((1u << (K - k)) - 1);
        __m256i last = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + k));
        _mm256_mask_storeu_epi16(out + k, mask, last);
    }
    for (k = K; k < tiles_of(K) * KC; k++) out[k] = 0;
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) Config;

/* Tiles 0-3 are sums, 4 and 5 activations, 6 and 7 weights; `rows` of tiles 0, 1 and 4. */
static void configure(int rows) {
    Config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
        config.colsb[tile] = 64;
        config.rows[tile] = 16;
    }
    config.rows[0] = config.rows[1] = config.rows[4] = (uint8_t)rows;
    _tile_loadconfig(&config);
}

typedef struct {
    const bf16 *w;
    const float *bias, *residual;
    float *y;
    int N, K;
} Product;

/* Writes `rows` rows of a tile of sums: columns of panel p, rows from m on. */
static inline void finish(const Product *product, const float *sums, int m, int rows, int p) {
    int left = product->N - p * NR;
    __mmask16 mask = left >= NR ? 0xffff : (__mmask16)((1u << left) - 1);
    __m512 bias = product->bias ? _mm512_maskz_loadu_ps(mask, product->bias + (size_t)p * NR) : _mm512_setzero_ps();
    for (int i = 0; i < rows; i++) {
        size_t to = (size_t)(m + i) * product->N + (size_t)p * NR;
        __m512 value = _mm512_load_ps(sums + i * NR);
        if (product->bias) value = _mm512_add_ps(value, bias);
        if (product->residual) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, product->residual + to));
        _mm512_mask_storeu_ps(product->y + to, mask, value);
    }
}

static inline void fetch(const bf16 *tile) {
    for (int line = 0; line < 16; line++) _mm_prefetch((const char *)(tile + line * 32), _MM_HINT_T0);
}

/* Up to 16 rows times panels first..last. */
static void few_rows(const Product *product, const bf16 *x, int m, int rows, int first, int last) {
    int tiles = tiles_of(product->K);
    int stride = tiles * KC * 2;
    float sums[2][NR * NR] __attribute__((aligned(64)));
    configure(rows);
    for (int p = first; p < last; p += 2) {
        int pair = p + 1 < last;
        const bf16 *one = product->w + (size_t)p * tiles * TILE, *two = pair ? one + (size_t)tiles * TILE : one;
        _tile_zero(0);
        _tile_zero(1);
        for (int t = 0; t < tiles; t++) {
            _tile_loadd(4, x + t * KC, stride);
            fetch(one + (t + AHEAD) * TILE);
            _tile_loadd(6, one + t * TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            if (pair) {
                fetch(two + (t + AHEAD) * TILE);
                _tile_loadd(7, two + t * TILE, 64);
                _tile_dpbf16ps(1, 4, 7);
            }
        }
        _tile_stored(0, sums[0], 64);
        finish(product, sums[0], m, rows, p);
        if (pair) {
            _tile_stored(1, sums[1], 64);
            finish(product, sums[1], m, rows, p + 1);
        }
    }
}

/* Blocks of 32 rows times pairs of panels, each pair of panels staying in the nearest cache meanwhile. */
static void many_rows(const Product *product, const bf16 *x, int M, int first, int last) {
    int tiles = tiles_of(product->K);
    int stride = tiles * KC * 2;
    float sums[NR * NR] __attribute__((aligned(64)));
    configure(16);
    for (int p = first; p < last; p += 2) {
        int pair = p + 1 < last;
        const bf16 *one = product->w + (size_t)p * tiles * TILE, *two = pair ? one + (size_t)tiles * TILE : one;
        for (int m = 0; m < M; m += 32) {
            const bf16 *low = x + (size_t)m * tiles * KC, *high = low + (size_t)16 * tiles * KC;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int t = 0; t < tiles; t++) {
                if (m == 0) fetch(one + (t + AHEAD) * TILE);
                _tile_loadd(6, one + t * TILE, 64);
                _tile_loadd(4, low + t * KC, stride);
                _tile_dpbf16ps(0, 4, 6);
                if (m == 0) fetch(two + (t + AHEAD) * TILE);
                _tile_loadd(7, two + t * TILE, 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, high + t * KC, stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            int rows = M - m < 16 ? M - m : 16, more = M - m - 16 > 16 ? 16 : M - m - 16;
            _tile_stored(0, sums, 64);
            finish(product, sums, m, rows, p);
            if (more > 0) {
                _tile_stored(2, sums, 64);
                finish(product, sums, m + 16, more, p);
            }
            if (pair) {
                _tile_stored(1, sums, 64);
                finish(product, sums, m, rows, p + 1);
                if (more > 0) {
                    _tile_stored(3, sums, 64);
                    finish(product, sums, m + 16, more, p + 1);
                }
            }
        }
    }
}

/* y = x wT + bias + residual, as fd_gemm_bf16. */
void fd_gemm_amx(const bf16 *w, const float *bias, const float *x, int64_t xs, const float *residual, float *y, int M,
                 int N, int K, int threads) {
    if (M == 0) return;
    Product product = {w, bias, residual, y, N, K};
    int panels = (N + NR - 1) / NR, padded = tiles_of(K) * KC;
    if ((int64_t)(M < 16 ? 16 : M) * N * K < SMALL) threads = 1;
    int rows = (M + 31) / 32 * 32;
    bf16 *packed = scratch((size_t)rows * padded * sizeof *packed);
    if (M <= 16)
        for (int m = 0; m < M; m++) narrow_row(x + m * xs, packed + (size_t)m * padded, K);
    _Pragma("omp parallel num_threads(threads)") {
        int thread = omp_get_thread_num(), team = omp_get_num_threads();
        int pairs = (panels + 1) / 2;
        int first = (int)((int64_t)pairs * thread / team) * 2, last = (int)((int64_t)pairs * (thread + 1) / team) * 2;
        if (last > panels) last = panels;
        if (M <= 16) {
            few_rows(&product, packed, 0, M, first, last);
        } else {
            _Pragma("omp for") for (int m = 0; m < M; m++) narrow_row(x + m * xs, packed + (size_t)m * padded, K);
            many_rows(&product, packed, M, first, last);
        }
        _tile_release();
    }
}
#else
int fd_amx_available(void) { return 0; }
#endif

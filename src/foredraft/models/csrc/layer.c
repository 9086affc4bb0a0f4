/* One decoder layer in one call, made of the kernels in kernels.c and amx.c: when a step has one token, getting from
 * Python to a kernel and back takes as long as the kernel. */
#include <stdint.h>

typedef struct Batch Batch;
typedef void (*Gemm)(const void *w, const float *bias, const float *x, int64_t xs, const float *residual, float *y,
                     int M, int N, int K, int threads);
typedef void (*Attention)(const Batch *b, const float *q, int64_t qs, const float *k, int64_t ks, const float *v,
                          int64_t vs, void *keys, void *values, float *out);

void fd_rms_norm(const float *x, int64_t stride, const float *weight, float *y, int R, int heads, int size, float eps,
                 int threads);
void fd_silu_mul(const float *gate_up, float *y, int M, int I, int threads);
void fd_rope(float *x, int64_t stride, const float *cosines, const float *sines, int M, int heads, int size, int half);

typedef struct {
    const void *w;
    const float *bias;
    Gemm gemm;
    int32_t N, K;
} Matrix;

typedef struct {
    const float *input_norm, *post_norm, *q_norm, *k_norm; /* the last two may be null */
    Matrix qkv, output, gate_up, down;
    Attention attention;
    int32_t heads, kv_heads, dim, half; /* half: half the dimensions that turn */
    float eps;
} Layer;

static void times(const Matrix *m, const float *x, const float *residual, float *y, int rows, int threads) {
    m->gemm(m->w, m->bias, x, m->K, residual, y, rows, m->N, m->K, threads);
}

/* x [T, d] becomes the layer's output. Scratch: wide [T, max(qkv.N, gate_up.N)], narrow [T, max(d, heads * dim,
 * down.K)], spare [T, (heads + kv_heads) * dim] where there are head norms. `b` has this layer's window and scale. */
void fd_layer(const Layer *layer, const Batch *b, float *x, const float *cosines, const float *sines, void *keys,
              void *values, float *wide, float *narrow, float *spare, int T, int threads) {
    int d = layer->qkv.K, heads = layer->heads, kv_heads = layer->kv_heads, dim = layer->dim, half = layer->half;
    int64_t stride = layer->qkv.N, q_stride = stride, k_stride = stride;
    float *q = wide, *k = wide + heads * dim, *v = k + kv_heads * dim;
    fd_rms_norm(x, d, layer->input_norm, narrow, T, 1, d, layer->eps, threads);
    times(&layer->qkv, narrow, 0, wide, T, threads);
    if (layer->q_norm) {
        float *normed = spare + (int64_t)T * heads * dim;
        fd_rms_norm(q, stride, layer->q_norm, spare, T, heads, dim, layer->eps, threads);
        fd_rms_norm(k, stride, layer->k_norm, normed, T, kv_heads, dim, layer->eps, threads);
        q = spare, k = normed;
        q_stride = heads * dim, k_stride = kv_heads * dim;
    }
    fd_rope(q, q_stride, cosines, sines, T, heads, dim, half);
    fd_rope(k, k_stride, cosines, sines, T, kv_heads, dim, half);
    layer->attention(b, q, q_stride, k, k_stride, v, stride, keys, values, narrow);
    times(&layer->output, narrow, x, x, T, threads);
    fd_rms_norm(x, d, layer->post_norm, narrow, T, 1, d, layer->eps, threads);
    times(&layer->gate_up, narrow, 0, wide, T, threads);
    fd_silu_mul(wide, narrow, T, layer->down.K, threads);
    times(&layer->down, narrow, x, x, T, threads);
}

// Copies a table of rows at a table of segments: row r of segment s is `unit * count[s]` words of contiguous memory,
// from src_at[s] + src_row[r] to dst_at[s] + dst_row[r]. Either side may be the memory of another GPU.
//
// Rows are cut into chunks of STEPS words for each of 2^lanes_log lanes; a warp works on 32 >> lanes_log chunks side by
// side. All chunks of all rows are numbered (chunk fastest, then row, then segment) and dealt to the warps of a grid
// of any size, so the number of blocks only decides how much of the GPU is used. Each thread has HELD loads under way
// at once: latency across the link is a microsecond or two.

#define HELD 8

struct Work {
    const long long* rows;        // [2][row_count]: src_row, dst_row; bytes
    const long long* segments;    // [3][segment_pitch]: src_at, dst_at; bytes; count
    unsigned row_count;
    unsigned segment_pitch;
    unsigned unit;                // words for each count
    unsigned lanes_log;
    unsigned chunks;              // of the longest row
    unsigned total;               // chunks * row_count * segments; below 2^31
    unsigned long long by_chunks; // x / chunks is (x * by_chunks) >> shift_chunks
    unsigned long long by_rows;   // x / row_count, the same way
    unsigned shift_chunks;
    unsigned shift_rows;
};

template <typename Word, int STEPS>
__device__ __forceinline__ void copy(const Work& w) {
    constexpr int CHUNKS = HELD / STEPS;
    const unsigned lanes = 1u << w.lanes_log;
    const unsigned lane = threadIdx.x & (lanes - 1);
    const unsigned group = (threadIdx.x & 31) >> w.lanes_log;
    const unsigned groups = 32u >> w.lanes_log;
    const unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    const unsigned long long piece = groups * CHUNKS;
    const unsigned long long hop = (unsigned long long)((gridDim.x * blockDim.x) >> 5) * piece;

    for (unsigned long long base = warp * piece; base < w.total; base += hop) {
        const Word* from[CHUNKS];
        Word* to[CHUNKS];
        unsigned left[CHUNKS]; // words from this lane's first one to the end of the row
        Word held[CHUNKS][STEPS];
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const unsigned long long wanted = base + c * groups + group;
            const unsigned chunk = wanted < w.total ? (unsigned)wanted : w.total - 1;
            const unsigned line = (unsigned)((chunk * w.by_chunks) >> w.shift_chunks);
            const unsigned segment = (unsigned)((line * w.by_rows) >> w.shift_rows);
            const unsigned row = line - segment * w.row_count;
            const unsigned word = (((chunk - line * w.chunks) * STEPS) << w.lanes_log) + lane;
            const unsigned words = w.unit * (unsigned)w.segments[2 * (unsigned long long)w.segment_pitch + segment];
            from[c] = (const Word*)(w.segments[segment] + w.rows[row]) + word;
            to[c] = (Word*)(w.segments[w.segment_pitch + segment] + w.rows[w.row_count + row]) + word;
            left[c] = wanted < w.total && word < words ? words - word : 0;
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < STEPS; ++i)
                if (i * lanes < left[c]) held[c][i] = __ldcs(from[c] + i * lanes);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < STEPS; ++i)
                if (i * lanes < left[c]) __stcs(to[c] + i * lanes, held[c][i]);
    }
}

#define KERNEL(BYTES, WORD, STEPS) \
    extern "C" __global__ void __launch_bounds__(1024) copy##BYTES##x##STEPS(const Work w) { copy<WORD, STEPS>(w); }
#define KERNELS(BYTES, WORD) \
    KERNEL(BYTES, WORD, 1) KERNEL(BYTES, WORD, 2) KERNEL(BYTES, WORD, 4) KERNEL(BYTES, WORD, 8)

KERNELS(16, uint4)
KERNELS(8, uint2)
KERNELS(4, unsigned int)
KERNELS(2, unsigned short)
KERNELS(1, unsigned char)

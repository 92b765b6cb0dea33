/* Part of _wheel.c: arenas, the memory of entries. Cells have 64 bytes, aligned: touching one costs one cache miss.
 *
 * An arena is 2 MiB at a multiple of 2 MiB: a header, a stack of freed cells, and the cells. The stack is
 * separate from the cells, so that the cells to be used next can be prefetched. Arenas with free cells form a
 * list whose head is the arena that last freed a cell: that cell is still in the cache, and is used next. An
 * empty arena is returned to the system, except SPARE_ARENAS of them, so that a wheel that grows and shrinks
 * does not map and unmap all the time.
 */
#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

#if (defined(__unix__) || defined(__APPLE__)) && !defined(__SANITIZE_ADDRESS__) && UINTPTR_MAX > UINT32_MAX
#define ARENA_BYTES ((size_t)1 << 21)
#define ARENA_CELLS_AT 65536
#define ARENA_CELLS ((ARENA_BYTES - ARENA_CELLS_AT) / 64)
#define SPARE_ARENAS 4
#define SMALL_ARENAS 4 /* further arenas use huge pages: fewer faults, fewer TLB misses */

typedef struct Arena {
    struct Arena *before, *after;
    uint32_t live;
    uint32_t fresh; /* the first cell that was never used */
    uint32_t freed_count;
    uint16_t freed[ARENA_CELLS];
} Arena;

static_assert(sizeof(Arena) <= ARENA_CELLS_AT && ARENA_CELLS <= 65536, "the header of an arena fits");
static_assert(sizeof(EntryObject) <= 64, "an entry fits a cell");

static Arena *arenas;
static size_t arena_count, empty_arenas;

static inline Arena *arena_of(void *p) { return (Arena *)((uintptr_t)p & ~(ARENA_BYTES - 1)); }

static inline char *arena_cell(Arena *a, size_t i) { return (char *)a + ARENA_CELLS_AT + 64 * i; }

static void arena_unlink(Arena *a)
{
    if (a->before) a->before->after = a->after; else arenas = a->after;
    if (a->after) a->after->before = a->before;
}

static void arena_link(Arena *a)
{
    a->before = NULL;
    a->after = arenas;
    if (arenas) arenas->before = a;
    arenas = a;
}

static Arena *arena_new(void)
{
    size_t both = 2 * ARENA_BYTES;
    char *raw = mmap(NULL, both, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return NULL;
    char *start = (char *)(((uintptr_t)raw + ARENA_BYTES - 1) & ~(ARENA_BYTES - 1));
    if (start > raw) munmap(raw, (size_t)(start - raw));
    if (start + ARENA_BYTES < raw + both)
        munmap(start + ARENA_BYTES, (size_t)(raw + both - start) - ARENA_BYTES);
#ifdef MADV_HUGEPAGE
    if (arena_count >= SMALL_ARENAS) (void)madvise(start, ARENA_BYTES, MADV_HUGEPAGE);
#endif
    Arena *a = (Arena *)start; /* the system gives zeroed pages */
    arena_count++;
    empty_arenas++;
    arena_link(a);
    return a;
}

static void *arena_fresh(Arena *a)
{
    char *cell = arena_cell(a, a->fresh);
#ifdef MADV_POPULATE_WRITE
    /* 64 KiB at a time: a page fault for every 64 entries would cost more than the entries do. */
    if (a->fresh % 1024 == 0) (void)madvise(cell, 65536, MADV_POPULATE_WRITE);
#endif
    a->fresh++;
    return cell;
}

static inline void *entry_alloc(void)
{
    Arena *a = arenas;
    if (UNLIKELY(a == NULL) && (a = arena_new()) == NULL) return NULL;
    void *p;
    if (a->freed_count) {
        p = arena_cell(a, a->freed[--a->freed_count]);
        if (a->freed_count >= FETCH_AHEAD) PREFETCH(arena_cell(a, a->freed[a->freed_count - FETCH_AHEAD]));
    }
    else p = arena_fresh(a);
    if (a->live++ == 0) empty_arenas--;
    if (UNLIKELY(a->live == ARENA_CELLS)) arena_unlink(a);
    return p;
}

static void entry_free(void *p)
{
    Arena *a = arena_of(p);
    int was_full = a->live == ARENA_CELLS;
    a->freed[a->freed_count++] = (uint16_t)(((char *)p - arena_cell(a, 0)) / 64);
    if (UNLIKELY(--a->live == 0)) {
        if (empty_arenas >= SPARE_ARENAS) {
            if (!was_full) arena_unlink(a);
            arena_count--;
            munmap(a, ARENA_BYTES);
            return;
        }
        empty_arenas++;
    }
    if (was_full) arena_link(a);
    else if (arenas != a) { arena_unlink(a); arena_link(a); }
}
#else
static void *entry_alloc(void) { return PyObject_Malloc(sizeof(EntryObject)); }
static void entry_free(void *p) { PyObject_Free(p); }
#endif

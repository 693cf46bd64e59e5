/* Counts what a program sends through MPI: preloaded, it stands before the MPI library and sees every caller.
 *
 * At the end of the job each rank writes $MPI_COUNT_DIR/RANK: a line "send DEST BYTES" for every rank of COMM_WORLD that
 * it sent to point to point, and a line "CALL TYPE BYTES" for what it handed in to collectives, by the type of an element.
 */
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define RANKS 64
enum { ALLREDUCE, ALLGATHER, ALLTOALL, GATHER, BCAST, CALLS };
static const char *NAMES[CALLS] = {"allreduce", "allgather", "alltoall", "gather", "bcast"};
static long long sent[RANKS], floats[CALLS], others[CALLS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static long long bytes_of(long long count, MPI_Datatype type) {
    int size = 0;
    PMPI_Type_size(type, &size);
    return count * size;
}

static void count_send(int count, MPI_Datatype type, int to, MPI_Comm comm) {
    MPI_Group group, world;
    int in_world = to;
    if (to < 0) return;
    PMPI_Comm_group(comm, &group);
    PMPI_Comm_group(MPI_COMM_WORLD, &world);
    PMPI_Group_translate_ranks(group, 1, &to, world, &in_world);
    PMPI_Group_free(&group);
    PMPI_Group_free(&world);
    pthread_mutex_lock(&lock);
    if (in_world >= 0 && in_world < RANKS) sent[in_world] += bytes_of(count, type);
    pthread_mutex_unlock(&lock);
}

static void count_call(int call, long long count, MPI_Datatype type) {
    pthread_mutex_lock(&lock);
    *(type == MPI_FLOAT ? &floats[call] : &others[call]) += bytes_of(count, type);
    pthread_mutex_unlock(&lock);
}

#define SEND(NAME)                                                                                                       \
    int MPI_##NAME(const void *buf, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm) {                      \
        count_send(count, type, to, comm);                                                                               \
        return PMPI_##NAME(buf, count, type, to, tag, comm);                                                             \
    }
SEND(Send)
SEND(Ssend)
SEND(Rsend)
SEND(Bsend)

#define ISEND(NAME)                                                                                                      \
    int MPI_##NAME(const void *buf, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *req) {    \
        count_send(count, type, to, comm);                                                                               \
        return PMPI_##NAME(buf, count, type, to, tag, comm, req);                                                        \
    }
ISEND(Isend)
ISEND(Issend)
ISEND(Irsend)
ISEND(Ibsend)

int MPI_Allreduce(const void *in, void *out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
    count_call(ALLREDUCE, count, type);
    return PMPI_Allreduce(in, out, count, type, op, comm);
}

int MPI_Allgather(const void *in, int count, MPI_Datatype type, void *out, int c, MPI_Datatype t, MPI_Comm comm) {
    count_call(ALLGATHER, in == MPI_IN_PLACE ? c : count, in == MPI_IN_PLACE ? t : type);
    return PMPI_Allgather(in, count, type, out, c, t, comm);
}

int MPI_Allgatherv(const void *in, int count, MPI_Datatype type, void *out, const int c[], const int d[], MPI_Datatype t,
                   MPI_Comm comm) {
    count_call(ALLGATHER, in == MPI_IN_PLACE ? 0 : count, in == MPI_IN_PLACE ? t : type);
    return PMPI_Allgatherv(in, count, type, out, c, d, t, comm);
}

int MPI_Alltoall(const void *in, int count, MPI_Datatype type, void *out, int c, MPI_Datatype t, MPI_Comm comm) {
    int size;
    PMPI_Comm_size(comm, &size);
    count_call(ALLTOALL, (long long)count * size, type);
    return PMPI_Alltoall(in, count, type, out, c, t, comm);
}

int MPI_Gather(const void *in, int count, MPI_Datatype type, void *out, int c, MPI_Datatype t, int root, MPI_Comm comm) {
    count_call(GATHER, in == MPI_IN_PLACE ? c : count, in == MPI_IN_PLACE ? t : type);
    return PMPI_Gather(in, count, type, out, c, t, root, comm);
}

int MPI_Bcast(void *buf, int count, MPI_Datatype type, int root, MPI_Comm comm) {
    count_call(BCAST, count, type);
    return PMPI_Bcast(buf, count, type, root, comm);
}

int MPI_Finalize(void) {
    const char *folder = getenv("MPI_COUNT_DIR");
    int rank, i;
    char path[4096];
    FILE *out;
    PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (folder) {
        snprintf(path, sizeof path, "%s/%d", folder, rank);
        if ((out = fopen(path, "w"))) {
            for (i = 0; i < RANKS; i++)
                if (sent[i]) fprintf(out, "send %d %lld\n", i, sent[i]);
            for (i = 0; i < CALLS; i++) {
                if (floats[i]) fprintf(out, "%s floats %lld\n", NAMES[i], floats[i]);
                if (others[i]) fprintf(out, "%s others %lld\n", NAMES[i], others[i]);
            }
            fclose(out);
        }
    }
    return PMPI_Finalize();
}

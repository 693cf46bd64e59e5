/* slow_link SPACE0 NAME0 SPACE1 NAME1 DELAY_US MBIT
 *
 * A link between two network namespaces with a delay and a rate each way, for kernels without netem: a TUN device in
 * each, and per direction one thread that takes packets in and one that lets each out when its time has come. Writes
 * "ready" when the devices are there, and runs until it is killed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define LARGEST 9216
#define QUEUE 8192 /* packets on the way; more are lost, as by a full card */

struct packet { int64_t due; int size; unsigned char data[LARGEST]; };
struct way { int from, to; struct packet *ring; sem_t filled, empty; };
static int64_t delay_ns;
static double ns_per_byte;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int open_device(const char *space, const char *name) {
    char path[256];
    struct ifreq request;
    int ns, fd;
    snprintf(path, sizeof path, "/var/run/netns/%s", space);
    memset(&request, 0, sizeof request);
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    if ((ns = open(path, O_RDONLY)) < 0 || setns(ns, 0) || (fd = open("/dev/net/tun", O_RDWR)) < 0 ||
        ioctl(fd, TUNSETIFF, &request)) {
        fprintf(stderr, "slow_link: %s in %s: %s\n", name, space, strerror(errno));
        exit(1);
    }
    close(ns);
    return fd;
}

static void *take_in(void *arg) {
    struct way *way = arg;
    int64_t sent = 0;
    for (unsigned at = 0;; at++) {
        struct packet *packet = &way->ring[at % QUEUE];
        sem_wait(&way->empty);
        do packet->size = read(way->from, packet->data, LARGEST);
        while (packet->size <= 0);
        int64_t now = now_ns();
        sent = (now > sent ? now : sent) + (int64_t)(packet->size * ns_per_byte);
        packet->due = sent + delay_ns;
        sem_post(&way->filled);
    }
    return NULL;
}

static void *let_out(void *arg) {
    struct way *way = arg;
    prctl(PR_SET_TIMERSLACK, 1);
    for (unsigned at = 0;; at++) {
        struct packet *packet = &way->ring[at % QUEUE];
        sem_wait(&way->filled);
        struct timespec until = {packet->due / 1000000000, packet->due % 1000000000};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {}
        if (write(way->to, packet->data, packet->size) < 0) {} /* the device is down: the packet is lost */
        sem_post(&way->empty);
    }
    return NULL;
}

int main(int count, char **words) {
    struct way ways[2];
    pthread_t thread;
    struct sched_param first = {.sched_priority = 10};
    if (count != 7) return 2;
    delay_ns = (int64_t)(atof(words[5]) * 1000);
    ns_per_byte = 8000 / atof(words[6]);
    int a = open_device(words[1], words[2]), b = open_device(words[3], words[4]);
    sched_setscheduler(0, SCHED_FIFO, &first); /* where it may not, the delay is less exact */
    for (int i = 0; i < 2; i++) {
        ways[i] = (struct way){i ? b : a, i ? a : b, calloc(QUEUE, sizeof(struct packet))};
        if (!ways[i].ring || sem_init(&ways[i].filled, 0, 0) || sem_init(&ways[i].empty, 0, QUEUE)) return 1;
        if (pthread_create(&thread, NULL, take_in, &ways[i]) || pthread_create(&thread, NULL, let_out, &ways[i])) return 1;
    }
    puts("ready");
    fflush(stdout);
    for (;;) pause();
}

/* Preloaded: a wall clock that is as many seconds ahead as the 64-bit number in the file $HONED_TEST_CLOCK says. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t none;
static volatile int64_t *ahead = &none;
static int (*gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("HONED_TEST_CLOCK");
  gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *place = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0);
  if (place != MAP_FAILED) ahead = place;
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  if (!gettime) begin(); /* called before the constructors */
  int result = gettime(clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *ahead;
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec found;
  (void)zone;
  int result = clock_gettime(CLOCK_REALTIME, &found);
  if (result == 0) *now = (struct timeval){found.tv_sec, found.tv_nsec / 1000};
  return result;
}

time_t time(time_t *now) {
  struct timespec found;
  time_t result = clock_gettime(CLOCK_REALTIME, &found) ? (time_t)-1 : found.tv_sec;
  if (now) *now = result;
  return result;
}

/* Calls kernels inside an emulator: maps the arena the tests share with it, then obeys lines of
   "library symbol offset" on stdin, calling symbol(arena + offset), and answers "done" after each. */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

int main(int count, char **arguments) {
  if (count != 3) return 2;
  size_t size = strtoull(arguments[2], NULL, 10);
  char *arena = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, open(arguments[1], O_RDWR), 0);
  if (arena == MAP_FAILED) return perror("the arena"), 1;
  printf("%zu\n", (size_t)arena);
  fflush(stdout);
  char library[4096], symbol[256];
  size_t offset;
  while (scanf("%4095s %255s %zu", library, symbol, &offset) == 3) {
    void *handle = dlopen(library, RTLD_NOW);
    void (*kernel)(void *) = handle ? (void (*)(void *))dlsym(handle, symbol) : NULL;
    if (!kernel) return fprintf(stderr, "%s\n", dlerror()), 1;
    kernel(arena + offset);
    puts("done");
    fflush(stdout);
  }
  return 0;
}

/* The smallest program that listens: it answers each connection's first byte
 * with itself. No library, a few pages of memory. Usage: tiny PORT */
static long call(long n, long a, long b, long c, long d, long e)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	long r;
	__asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
	return r;
}

enum { sys_read, sys_write, sys_close = 3, sys_socket = 41, sys_accept = 43, sys_bind = 49, sys_listen = 50, sys_setsockopt = 54, sys_exit = 60 };

__attribute__((used)) static void serve(long *stack)
{
	unsigned port = 0;
	int one = 1;
	char byte;
	struct { unsigned short family, port; unsigned address; char zero[8]; } at = { 2 };

	if (stack[0] < 2)
		call(sys_exit, 2, 0, 0, 0, 0);
	for (char *p = (char *)stack[2]; *p >= '0' && *p <= '9'; p++)
		port = port * 10 + (*p - '0');
	at.port = (unsigned short)(port >> 8 | port << 8);
	at.address = 0x0100007f;
	long l = call(sys_socket, 2, 1, 0, 0, 0);
	call(sys_setsockopt, l, 1, 2, (long)&one, sizeof one);
	if (call(sys_bind, l, (long)&at, sizeof at, 0, 0) || call(sys_listen, l, 128, 0, 0, 0))
		call(sys_exit, 1, 0, 0, 0, 0);
	for (;;) {
		long c = call(sys_accept, l, 0, 0, 0, 0);
		if (c < 0)
			continue;
		if (call(sys_read, c, (long)&byte, 1, 0, 0) == 1)
			call(sys_write, c, (long)&byte, 1, 0, 0);
		call(sys_close, c, 0, 0, 0, 0);
	}
}

__attribute__((naked, noreturn)) void _start(void)
{
	__asm__("mov %rsp, %rdi\n\tand $-16, %rsp\n\tcall serve");
}

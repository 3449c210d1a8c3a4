/* The recorded traces that fence.pml follows with TRACES: the file that the variable
 * TRACES names, with a line for each. A line has the scenario, the number of events,
 * and the events. accepted and furthest are not part of a state. */

#define LOST (-1)
#define MOST 200000 /* traces */

struct recording { int scenario[9], n, *events; };
static struct recording *recordings;
static int recorded_traces;
static unsigned char accepted[MOST];
static int furthest[MOST];

static void report(void);

static void load(void) {
	FILE *f = fopen(getenv("TRACES"), "r");
	int n, i, k;
	if (!f || fscanf(f, "%d", &n) != 1 || n > MOST) { fprintf(stderr, "no traces\n"); exit(2); }
	recordings = calloc(n, sizeof *recordings);
	for (i = 0; i < n; i++) {
		struct recording *r = &recordings[i];
		for (k = 0; k < 10; k++)
			if (fscanf(f, "%d", k < 9 ? &r->scenario[k] : &r->n) != 1) exit(2);
		r->events = calloc(r->n + 1, sizeof *r->events);
		for (k = 0; k < r->n; k++)
			if (fscanf(f, "%d", &r->events[k]) != 1) exit(2);
	}
	fclose(f);
	recorded_traces = n;
	atexit(report);
}

static void report(void) {
	for (int i = 0; i < recorded_traces; i++)
		if (!accepted[i]) printf("rejected: %d %d\n", i, furthest[i]);
	printf("traces: %d\n", recorded_traces);
}

static void scenario(void) {
	int *s = recordings[now.which].scenario;
	now.quiet = s[0]; now.deep = s[1]; now.relayed[0] = s[2]; now.relayed[1] = s[3]; now.clients = s[4];
	now.requests = s[5]; now.users = s[6]; now.verbs = s[7]; now.checks = s[8];
}

/* follow compares the step seen with the next one that was recorded. */
static void follow(void) {
	struct recording *r = &recordings[now.which];
	if (now.at == LOST || accepted[now.which] || r->events[now.at] != now.seen)
		now.at = LOST;
	else {
		if (++now.at > furthest[now.which]) furthest[now.which] = now.at;
		if (now.at == r->n) accepted[now.which] = 1;
	}
	now.seen = 0;
}

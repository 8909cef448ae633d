/* A module that calls another module's command in ways that a client cannot: as a user outside of the
 * ACL table, and without any user. Redis' API is declared by hand, as in the module under test. Only the
 * tests compile and use this file. */
#include <errno.h>
#include <stddef.h>

typedef struct Ctx Ctx;
typedef struct Text Text;
typedef struct User User;
typedef struct Reply Reply;
typedef int (*Command)(Ctx *, Text **, int);

static int (*CreateCommand)(Ctx *, const char *, Command, const char *, int, int, int);
static void (*SetModuleAttribs)(Ctx *, const char *, int, int);
static const char *(*StringPtrLen)(const Text *, size_t *);
static User *(*CreateModuleUser)(const char *);
static int (*SetModuleUserACL)(User *, const char *);
static int (*AuthenticateClientWithUser)(Ctx *, User *, void *, void *, unsigned long long *);
static Reply *(*Call)(Ctx *, const char *, const char *, ...);
static int (*ReplyWithCallReply)(Ctx *, Reply *);
static int (*ReplyWithSimpleString)(Ctx *, const char *);
static int (*ReplyWithError)(Ctx *, const char *);

/* CALLER.BECOME name rule...: the client acts from now on as a new user with these ACL rules. */
static int become(Ctx *ctx, Text **words, int count) {
    if (count < 2) return ReplyWithError(ctx, "ERR a name is missing");
    User *user = CreateModuleUser(StringPtrLen(words[1], NULL));
    for (int at = 2; at < count; at++)
        if (SetModuleUserACL(user, StringPtrLen(words[at], NULL)) != 0) return ReplyWithError(ctx, "ERR no such rule");
    if (AuthenticateClientWithUser(ctx, user, NULL, NULL, NULL) != 0) return ReplyWithError(ctx, "ERR it is off");
    return ReplyWithSimpleString(ctx, "OK");
}

/* CALLER.PASS flags run_id call: calls redlock.call with these flags of RedisModule_Call. */
static int pass(Ctx *ctx, Text **words, int count) {
    if (count != 4) return ReplyWithError(ctx, "ERR three words are wanted");
    const char *flags = StringPtrLen(words[1], NULL);
    char format[8] = "ss";
    for (int at = 0; at < 4 && flags[at] != 0 && flags[at] != '-'; at++) format[2 + at] = flags[at];
    Reply *reply = Call(ctx, "redlock.call", format, words[2], words[3]);
    if (reply == NULL) return ReplyWithError(ctx, errno == EACCES ? "ERR not allowed" : "ERR not called");
    return ReplyWithCallReply(ctx, reply);
}

int RedisModule_OnLoad(Ctx *ctx, Text **words, int count) {
    (void)words, (void)count;
    int (*get)(const char *, void *) = *(int (**)(const char *, void *))ctx;
#define FIND(name) if (get("RedisModule_" #name, (void *)&name) != 0) return 1
    FIND(CreateCommand);
    FIND(SetModuleAttribs);
    FIND(StringPtrLen);
    FIND(CreateModuleUser);
    FIND(SetModuleUserACL);
    FIND(AuthenticateClientWithUser);
    FIND(Call);
    FIND(ReplyWithCallReply);
    FIND(ReplyWithSimpleString);
    FIND(ReplyWithError);
    SetModuleAttribs(ctx, "caller", 1, 1);
    if (CreateCommand(ctx, "caller.become", become, "no-auth", 0, 0, 0) != 0) return 1;
    return CreateCommand(ctx, "caller.pass", pass, "", 0, 0, 0);
}
